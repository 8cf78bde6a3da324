// SPDX-License-Identifier: Apache-2.0
//
// A client using memory like the training of a small transformer: parameters, gradients and two optimizer states stay,
// activations come in the forward pass and go in the backward pass. The client computes nothing, but writes and later
// verifies every byte. Sizes follow from the session's limit.
//
// Exits with 0 on SIGTERM or after --steps if all bytes were right, else 1.
#include <signal.h>

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "allocator/base/bytes.h"
#include "allocator/base/command_line.h"
#include "vrambroker/client.h"

namespace {

struct Flags {
  std::string name = "demo";
  std::string limit = "0.25";
  int steps = 0;
  bool ask_beyond_limit = false;
};
Flags& flags() {
  static Flags values;
  return values;
}

using vrambroker::Buffer;
using vrambroker::Client;
using vrambroker::FormatBytes;

volatile sig_atomic_t stop = 0;

// A tensor of floats with known bytes.
class Tensor {
 public:
  // The pattern repeats the tensor's number: cheap to make, and different in each tensor and process.
  static absl::StatusOr<Tensor> Make(Client& client, uint64_t floats, uint64_t number) {
    absl::StatusOr<Buffer> buffer = client.Allocate(floats * sizeof(float));
    if (!buffer.ok()) return buffer.status();
    Tensor tensor(*std::move(buffer), number ^ (client.session_id() << 40));
    const std::vector<uint64_t> piece(kPieceWords, tensor.pattern_);
    for (uint64_t offset = 0; offset < tensor.buffer_.size(); offset += kPieceBytes) {
      const uint64_t bytes = std::min(kPieceBytes, tensor.buffer_.size() - offset);
      if (absl::Status status = tensor.buffer_.Write(offset, piece.data(), bytes); !status.ok()) return status;
    }
    return tensor;
  }

  uint64_t bytes() const { return buffer_.size(); }

  absl::Status Verify() const {
    const std::vector<uint64_t> piece(kPieceWords, pattern_);
    std::vector<uint64_t> found(kPieceWords);
    for (uint64_t offset = 0; offset < buffer_.size(); offset += kPieceBytes) {
      const uint64_t bytes = std::min(kPieceBytes, buffer_.size() - offset);
      if (absl::Status status = buffer_.Read(offset, found.data(), bytes); !status.ok()) return status;
      if (std::memcmp(piece.data(), found.data(), bytes) != 0) {
        return absl::DataLossError("a tensor holds other bytes than were written to it");
      }
    }
    return absl::OkStatus();
  }

 private:
  static constexpr uint64_t kPieceWords = 1 << 15;
  static constexpr uint64_t kPieceBytes = kPieceWords * sizeof(uint64_t);

  Tensor(Buffer buffer, uint64_t pattern) : buffer_(std::move(buffer)), pattern_(pattern) {}

  Buffer buffer_;
  uint64_t pattern_;
};

// A decoder-only transformer; sizes are numbers of floats.
struct Model {
  static constexpr uint64_t kLayers = 4, kHeads = 4, kSequence = 128, kVocabulary = 4096;
  uint64_t width = 64;
  uint64_t batch = 1;

  std::vector<uint64_t> Parameters() const {
    std::vector<uint64_t> tensors = {kVocabulary * width, kSequence * width};
    for (uint64_t layer = 0; layer < kLayers; ++layer) {
      for (const uint64_t floats :
           {width, 3 * width * width, width * width, width, 4 * width * width, 4 * width * width}) {
        tensors.push_back(floats);
      }
    }
    return tensors;
  }

  // Tensors kept by a layer's forward pass for the backward pass.
  std::vector<uint64_t> LayerActivations() const {
    const uint64_t tokens = batch * kSequence;
    return {tokens * width,     3 * tokens * width, batch * kHeads * kSequence * kSequence,
            tokens * width,     tokens * width,     4 * tokens * width,
            4 * tokens * width, tokens * width};
  }

  static uint64_t Bytes(const std::vector<uint64_t>& tensors) {
    uint64_t sum = 0;
    for (const uint64_t floats : tensors) sum += floats * sizeof(float);
    return sum;
  }

  // The largest model using about half of the limit, leaving room for rounding and whole segments.
  static Model ForLimit(uint64_t limit_bytes) {
    Model model;
    while (4 * Bytes(Model{.width = model.width + 64}.Parameters()) < limit_bytes / 4) model.width += 64;
    while (kLayers * Bytes(Model{.width = model.width, .batch = model.batch + 1}.LayerActivations()) <
           limit_bytes / 4) {
      ++model.batch;
    }
    return model;
  }
};

// Requests more than the limit; succeeds when the request is refused as expected.
absl::Status AskBeyondLimit(Client& client) {
  const absl::StatusOr<Buffer> refused = client.Allocate(client.limit_bytes() + 1);
  const std::optional<vrambroker::OutOfMemory> oom = vrambroker::GetOutOfMemory(refused.status());
  if (refused.ok() || !oom.has_value() || oom->cause != vrambroker::OutOfMemory::Cause::kLimit) {
    return absl::InternalError("a request beyond the limit was not refused as such: " + refused.status().ToString());
  }
  std::printf("refused: cause %s; requested %" PRIu64 " B, limit %" PRIu64 " B, reserved %s, allocated %s. %s\n",
              vrambroker::OutOfMemoryCauseName(oom->cause), oom->requested_bytes, oom->limit_bytes,
              FormatBytes(oom->reserved_bytes).c_str(), FormatBytes(oom->allocated_bytes).c_str(), oom->advice.c_str());
  std::fflush(stdout);
  return absl::OkStatus();
}

absl::Status Train(Client& client) {
  const Model model = Model::ForLimit(client.limit_bytes());
  uint64_t number = 1;
  std::vector<Tensor> state;
  for (int copy = 0; copy < 4; ++copy) {  // parameters, gradients, first and second moment
    for (const uint64_t floats : model.Parameters()) {
      absl::StatusOr<Tensor> tensor = Tensor::Make(client, floats, number++);
      if (!tensor.ok()) return tensor.status();
      state.push_back(*std::move(tensor));
    }
  }
  uint64_t verified_bytes = 0;
  const int steps = flags().steps;
  for (int step = 1; stop == 0 && (steps == 0 || step <= steps); ++step) {
    std::vector<Tensor> activations;
    for (uint64_t layer = 0; layer < Model::kLayers; ++layer) {
      for (const uint64_t floats : model.LayerActivations()) {
        absl::StatusOr<Tensor> tensor = Tensor::Make(client, floats, number++);
        if (!tensor.ok()) return tensor.status();
        activations.push_back(*std::move(tensor));
      }
    }
    for (; !activations.empty(); activations.pop_back()) {
      if (absl::Status status = activations.back().Verify(); !status.ok()) return status;
      verified_bytes += activations.back().bytes();
    }
    if (flags().ask_beyond_limit && step == 3) {
      if (absl::Status status = AskBeyondLimit(client); !status.ok()) return status;
    }
    for (const Tensor& tensor : state) {
      if (absl::Status status = tensor.Verify(); !status.ok()) return status;
      verified_bytes += tensor.bytes();
    }
    std::printf("step %d verified %s width %" PRIu64 " batch %" PRIu64 "\n", step, FormatBytes(verified_bytes).c_str(),
                model.width, model.batch);
    std::fflush(stdout);
  }
  return absl::OkStatus();
}

}  // namespace

int main(int argc, char** argv) {
  const std::unique_ptr<CLI::App> app = vrambroker::MakeCommandLine(
      "vrambroker-demo", "Uses memory as the training of a small transformer does, and verifies every byte.");
  app->add_option("--name", flags().name, "Name of the session. Default: demo.")->type_name("NAME");
  app->add_option("--limit", flags().limit,
                  "Limit to ask for: 0.25 or 25% of the capacity, or a size as 8GiB. Default: 0.25.")
      ->type_name("LIMIT");
  app->add_option("--steps", flags().steps, "Stop after so many steps. Default: at SIGTERM.")->type_name("N");
  app->add_flag("--ask-beyond-limit", flags().ask_beyond_limit,
                "Ask for one byte more than the limit at step 3, and show the answer.");
  if (const std::optional<int> code = vrambroker::ParseOrPrint(*app, argc, argv)) return *code;
  signal(SIGTERM, [](int) { stop = 1; });

  const absl::StatusOr<vrambroker::Limit> limit = vrambroker::ParseLimit(flags().limit);
  absl::Status status = limit.status();
  if (status.ok()) {
    absl::StatusOr<Client> client = Client::Connect({.name = flags().name, .limit = *limit});
    status = client.ok() ? Train(*client) : client.status();
  }
  if (status.ok()) return 0;
  std::fprintf(stderr, "%s: %s\n", flags().name.c_str(), status.ToString().c_str());
  return 1;
}
