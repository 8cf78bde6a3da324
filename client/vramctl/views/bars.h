// SPDX-License-Identifier: Apache-2.0
//
// Drawings of top and map, without a terminal: bars of cells, text safe to print, styled lines.
#ifndef VRAMBROKER_CLIENT_VRAMCTL_VIEWS_BARS_H_
#define VRAMBROKER_CLIENT_VRAMCTL_VIEWS_BARS_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace vrambroker::vramctl {

// Uses of memory, in the terms of deploy/GLOSSARY.md.
enum class Part : uint8_t {
  kAllocated,
  kPending,      // freed by its owner, still in use by a stream
  kFragmented,   // free, in segments also holding used blocks: no trim can return the memory
  kReclaimable,  // in a session's segments without a block: given back on demand
  kUnknown,      // carried over by a remote session: the daemon does not know its blocks
  kCached,       // kept by the daemon for reuse: belongs to no session
  kLeftBehind,   // belongs to no session either, and is not available yet
  kFree,         // not reserved
};
inline constexpr std::array<Part, 8> kAllParts = {Part::kAllocated,   Part::kPending, Part::kFragmented,
                                                  Part::kReclaimable, Part::kUnknown, Part::kCached,
                                                  Part::kLeftBehind,  Part::kFree};

const char* PartName(Part part);

// Bytes, or cells, of each part.
template <typename Count>
class Parts {
 public:
  Count& operator[](Part part) { return counts_[static_cast<size_t>(part)]; }
  Count operator[](Part part) const { return counts_[static_cast<size_t>(part)]; }
  void Add(const Parts& other) {
    for (const Part part : kAllParts) (*this)[part] += other[part];
  }
  Count Sum() const {
    Count sum = 0;
    for (const Count count : counts_) sum += count;
    return sum;
  }

 private:
  std::array<Count, kAllParts.size()> counts_ = {};
};
using PartBytes = Parts<uint64_t>;
using PartCells = Parts<int>;

// FRAG, 0 to 1: fragmented bytes (no trim returns them) / bytes held by sessions. 0 if sessions hold nothing.
double FragmentedShare(const PartBytes& parts);

// Distributes `width` cells in proportion. Each non-empty part gets a cell if there are enough. If all parts are empty,
// all cells are free.
PartCells ShareCells(const PartBytes& bytes, int width);

// Styles of text on capable terminals; the glyphs carry the same information without styles.
enum class Style : uint8_t {
  kPlain,
  kTitle,
  kDim,
  kHeading,
  kSelected,
  kAlarm,
  kAllocated,  // a style for each part, in the order of the parts
  kPending,
  kFragmented,
  kReclaimable,
  kUnknown,
  kCached,
  kLeftBehind,
  kFree,
  kSession0,  // kSessionStyles styles to distinguish sessions
  kSession1,
  kSession2,
  kSession3,
  kSession4,
  kSession5,
};
inline constexpr size_t kSessionStyles = 6;
inline constexpr size_t kStyles = static_cast<size_t>(Style::kSession5) + 1;

Style StyleOf(Part part);
Style StyleOfSession(size_t index);

// Returns a cell of a part, as UTF-8 or as ASCII.
const char* Glyph(Part part, bool utf8);

struct Span {
  std::string text;
  Style style = Style::kPlain;
};
using Line = std::vector<Span>;

// Returns the bar of `width` cells.
Line Bar(const PartBytes& bytes, int width, bool utf8);

// Returns the width of a text: all text drawn here takes a cell per character.
int Cells(absl::string_view text);
int Cells(const Line& line);
// Cuts the line to at most `width` cells.
Line Clip(Line line, int width);

// Places items next to each other, three spaces apart, in lines of at most `width` cells; items are never cut.
std::vector<Line> Pack(const std::vector<Line>& items, int width);

// Escapes everything but printable ASCII as \x1b and the like: text chosen by clients (names, messages) must not
// control the terminal.
std::string Printable(absl::string_view text);

// Returns exactly `width` cells: padded with spaces, or cut, with a '~' at the end.
std::string Fit(absl::string_view text, int width, bool right = false);

// Shortens printable text to at most `width` cells, by removing the middle: names often differ at their ends.
std::string ShortenMiddle(absl::string_view text, int width, bool utf8);
// Shortens text at the end of a word, with an ellipsis.
std::string ShortenAtWord(absl::string_view text, int width, bool utf8);

// Wraps printable text to lines of at most `width` cells, at spaces and within words longer than a line.
std::vector<std::string> Wrap(absl::string_view text, int width);

// Formats bytes with at most 6 characters: "0", "512B", "0.98K" (1000 bytes), "20.0M", "1.50G".
std::string ShortBytes(uint64_t bytes);

// Renders a line for a terminal: with colours by escape sequences, or without colours.
std::string Render(const Line& line, bool colour);

}  // namespace vrambroker::vramctl

#endif  // VRAMBROKER_CLIENT_VRAMCTL_VIEWS_BARS_H_
