// SPDX-License-Identifier: Apache-2.0
//
// What top and map draw, without a terminal: bars of cells, text that is safe to print, styled lines.
#ifndef VRAMBROKER_CLIENT_VRAMCTL_VIEWS_BARS_H_
#define VRAMBROKER_CLIENT_VRAMCTL_VIEWS_BARS_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace vrambroker::vramctl {

// What memory is in use for, in the words of deploy/GLOSSARY.md.
enum class Part : uint8_t {
  kAllocated,
  kPending,      // freed by its owner, still in use by a stream
  kFragmented,   // free, in segments that also hold used blocks: no trim can return it
  kReclaimable,  // in a session's segments that hold no block: given back when somebody needs it
  kUnknown,      // carried over by a remote session: the daemon does not know its blocks
  kCached,       // kept by the daemon for reuse: of no session
  kLeftBehind,   // of no session either, and nobody can have it yet
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

// FRAG, 0 to 1: fragmented / held by sessions, which is what no trim gives back. 0 where sessions hold nothing.
double FragmentedShare(const PartBytes& parts);

// Shares `width` cells out in proportion. What is there at all gets a cell where there are enough. All of nothing is
// free.
PartCells ShareCells(const PartBytes& bytes, int width);

// How text is shown where the terminal can; the glyphs say the same without.
enum class Style : uint8_t {
  kPlain,
  kTitle,
  kDim,
  kHeading,
  kSelected,
  kAlarm,
  kAllocated,  // one for each part, in their order
  kPending,
  kFragmented,
  kReclaimable,
  kUnknown,
  kCached,
  kLeftBehind,
  kFree,
  kSession0,  // kSessionStyles for telling sessions apart
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

// One cell of a part, as UTF-8 or as ASCII.
const char* Glyph(Part part, bool utf8);

struct Span {
  std::string text;
  Style style = Style::kPlain;
};
using Line = std::vector<Span>;

// The bar of `width` cells.
Line Bar(const PartBytes& bytes, int width, bool utf8);

// Cells that a text takes: all that is drawn here is one cell a character.
int Cells(absl::string_view text);
int Cells(const Line& line);
// Cut to at most `width` cells.
Line Clip(Line line, int width);

// The items one after the other, three spaces apart, in lines of at most `width` cells; an item is never cut.
std::vector<Line> Pack(const std::vector<Line>& items, int width);

// The text with everything but printable ASCII as \x1b and the like: what others chose (names, messages) must not
// command the terminal.
std::string Printable(absl::string_view text);

// Exactly `width` cells: filled with spaces, or cut, which shows as a '~' at its end.
std::string Fit(absl::string_view text, int width, bool right = false);

// The text, which is printable, in at most `width` cells. A longer one loses its middle: names often differ at their
// ends.
std::string ShortenMiddle(absl::string_view text, int width, bool utf8);
// The same, but a longer text ends after a word, with an ellipsis.
std::string ShortenAtWord(absl::string_view text, int width, bool utf8);

// The text, which is printable, in lines of at most `width` cells; cut at spaces, and within words that are longer.
std::vector<std::string> Wrap(absl::string_view text, int width);

// At most 6 characters: "0", "512B", "0.98K" (1000 bytes), "20.0M", "1.50G".
std::string ShortBytes(uint64_t bytes);

// What a line looks like on a terminal: with colours by escape sequences, or without any.
std::string Render(const Line& line, bool colour);

}  // namespace vrambroker::vramctl

#endif  // VRAMBROKER_CLIENT_VRAMCTL_VIEWS_BARS_H_
