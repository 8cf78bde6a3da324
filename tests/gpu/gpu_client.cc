// SPDX-License-Identifier: Apache-2.0
//
// A client of the broker for the checks: executes commands from standard input, by the C library, and answers. A line
// of input is a JSON object, {"do": "malloc", "bytes": 4096}; a line of output {"ok": true, ...}, or {"ok": false,
// "code": ..., "message": ...}. Numbers name blocks and streams; stream 0 is the default stream. Times are microseconds
// of CLOCK_MONOTONIC, which all processes share. The client ends at the end of its input, without giving memory back.
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <iostream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/gpu/work.h"
#include "vrambroker/vrambroker.h"

namespace {

using Json = nlohmann::ordered_json;

double NowUs() {
  timespec now = {};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<double>(now.tv_sec) * 1e6 + static_cast<double>(now.tv_nsec) / 1e3;
}

struct BrokerError {
  std::string code;
  std::string message;
};

void Check(int code) {
  if (code != VRAMBROKER_OK) throw BrokerError{vrambroker_code_name(code), vrambroker_last_error_message()};
}

Json Percentiles(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const auto at = [&values](double fraction) {
    return values[static_cast<size_t>(fraction * static_cast<double>(values.size() - 1))];
  };
  return {{"p50_us", at(0.5)}, {"p99_us", at(0.99)}, {"max_us", values.back()}, {"count", values.size()}};
}

class GpuClient {
 public:
  Json Do(const Json& command) {
    const std::string what = command.at("do");
    const auto found = Commands().find(what);
    if (found == Commands().end()) throw BrokerError{"USAGE", "no such command: " + what};
    return (this->*found->second)(command);
  }

 private:
  struct Block {
    char* memory = nullptr;
    uint64_t bytes = 0;
    enum { kBlock, kSegment, kOwn } kind = kBlock;
  };
  using Command = Json (GpuClient::*)(const Json&);
  static const std::map<std::string, Command>& Commands();

  Block& At(const Json& c) { return blocks_.at(c.at("block")); }
  work::Stream StreamOf(const Json& c) { return streams_.at(c.value("stream", 0)); }
  Json Keep(void* memory, uint64_t bytes, decltype(Block::kBlock) kind, double start) {
    const double end = NowUs();
    blocks_[++last_block_] = {static_cast<char*>(memory), bytes, kind};
    return {{"block", last_block_}, {"started_us", start}, {"ended_us", end}};
  }

  // Takes name, limit, guarantee, wait_ms, alloc_conf, idle_decay_ms, and use_device: whether this program itself uses
  // the GPU, too.
  Json Connect(const Json& c) {
    const auto text = [&c, this](const char* key) -> const char* {
      return c.contains(key) ? texts_.emplace_back(c[key].get<std::string>()).c_str() : nullptr;
    };
    texts_.clear();
    texts_.reserve(4);
    vrambroker_options options = VRAMBROKER_OPTIONS_INIT;
    options.name = text("name");
    options.limit = text("limit");
    options.guarantee = text("guarantee");
    options.alloc_conf = text("alloc_conf");
    options.wait_ms = c.value("wait_ms", 0);
    options.idle_decay_ms = c.value("idle_decay_ms", 0);
    Check(vrambroker_connect(&options, &client_));
    vrambroker_device device = {};
    device.struct_size = sizeof device;
    Check(vrambroker_get_device(client_, 0, &device));
    const int ordinal = c.value("use_device", true) ? work::UseDevice(device.uuid) : -1;
    return {{"pid", getpid()},
            {"kind", device.kind},
            {"name", device.name},
            {"uuid", device.uuid},
            {"ordinal_here", ordinal},
            {"capacity_bytes", device.capacity_bytes},
            {"limit_bytes", device.limit_bytes}};
  }
  Json Disconnect(const Json&) {
    Check(vrambroker_disconnect(client_));
    client_ = nullptr;
    return Json::object();
  }
  Json Status(const Json&) {
    Check(vrambroker_status(client_));
    return Json::object();
  }

  Json Malloc(const Json& c) {
    const uint64_t bytes = c.at("bytes");
    void* memory = nullptr;
    const double start = NowUs();
    Check(vrambroker_malloc_stream(client_, bytes, 0, StreamOf(c), &memory));
    return Keep(memory, bytes, Block::kBlock, start);
  }
  Json Lease(const Json& c) {
    const uint64_t bytes = c.at("bytes");
    void* memory = nullptr;
    const double start = NowUs();
    Check(vrambroker_lease_segment(client_, bytes, 0, &memory));
    return Keep(memory, bytes, Block::kSegment, start);
  }
  Json OwnMalloc(const Json& c) {
    const uint64_t bytes = c.at("bytes");
    const double start = NowUs();
    return Keep(work::Allocate(bytes), bytes, Block::kOwn, start);
  }
  Json Free(const Json& c) {
    const Block block = At(c);
    blocks_.erase(c.at("block"));
    const double start = NowUs();
    if (block.kind == Block::kBlock) Check(vrambroker_free(client_, block.memory));
    if (block.kind == Block::kSegment) Check(vrambroker_return_segment(client_, block.memory));
    if (block.kind == Block::kOwn) work::Release(block.memory);
    return {{"started_us", start}, {"ended_us", NowUs()}};
  }
  Json RecordStream(const Json& c) {
    Check(vrambroker_record_stream(client_, At(c).memory, StreamOf(c)));
    return Json::object();
  }
  Json EmptyCache(const Json&) {
    uint64_t released = 0;
    Check(vrambroker_empty_cache(client_, &released));
    return {{"released_bytes", released}};
  }
  Json Stats(const Json&) {
    vrambroker_memory_stats stats = {};
    stats.struct_size = sizeof stats;
    Check(vrambroker_get_memory_stats(client_, 0, &stats));
    return {{"reserved_bytes", stats.reserved_bytes},
            {"allocated_bytes", stats.allocated_bytes},
            {"segments", stats.segments}};
  }
  // Leases and fills `count` segments of `bytes` for the session.
  Json LeaseMany(const Json& c) {
    const uint64_t bytes = c.at("bytes");
    const int count = c.at("count");
    std::vector<double> us;
    us.reserve(static_cast<size_t>(count));
    for (int i = 0; i < count; ++i) {
      void* memory = nullptr;
      const double start = NowUs();
      Check(vrambroker_lease_segment(client_, bytes, 0, &memory));
      us.push_back(NowUs() - start);
      work::Fill(memory, bytes, static_cast<uint64_t>(i) + 1, nullptr);
      many_.push_back({static_cast<char*>(memory), bytes, Block::kSegment});
    }
    work::Wait(nullptr);
    return Percentiles(us);
  }
  Json LookAtMany(const Json&) {
    uint64_t wrong = 0;
    for (size_t i = 0; i < many_.size(); ++i) {
      const work::Content content = work::Look(many_[i].memory, many_[i].bytes, i + 1);
      wrong += content.words - content.equal;
    }
    return {{"segments", many_.size()}, {"wrong_words", wrong}};
  }
  Json ReturnMany(const Json&) {
    std::vector<double> us;
    us.reserve(many_.size());
    for (const Block& block : many_) {
      const double start = NowUs();
      Check(vrambroker_return_segment(client_, block.memory));
      us.push_back(NowUs() - start);
    }
    many_.clear();
    return Percentiles(us);
  }

  Json NewStream(const Json&) {
    streams_.push_back(work::NewStream());
    return {{"stream", streams_.size() - 1}};
  }
  Json Done(const Json& c) { return {{"done", work::Done(StreamOf(c))}}; }
  Json Wait(const Json& c) {
    work::Wait(StreamOf(c));
    return {{"ended_us", NowUs()}};
  }
  Json Fill(const Json& c) {
    const Block& block = At(c);
    work::Fill(block.memory, block.bytes, c.at("seed"), StreamOf(c));
    if (!c.value("queue", false)) work::Wait(StreamOf(c));
    return Json::object();
  }
  Json Spin(const Json& c) {
    work::Spin(c.at("ms"), StreamOf(c));
    return {{"started_us", NowUs()}};
  }
  Json Increment(const Json& c) {
    work::Increment(reinterpret_cast<uint64_t*>(At(c).memory), c.at("ms"), StreamOf(c));
    return Json::object();
  }
  Json Look(const Json& c) {
    const Block& block = At(c);
    const work::Content content = work::Look(block.memory, block.bytes, c.value("seed", uint64_t{0}));
    return {{"words", content.words}, {"equal", content.equal}, {"nonzero", content.nonzero}};
  }
  // Looks again and again for `ms`. Returns the number of looks, and the sum of words that differed from the pattern.
  Json Watch(const Json& c) {
    const Block& block = At(c);
    const double end = NowUs() + c.at("ms").get<double>() * 1e3;
    uint64_t looks = 0;
    uint64_t wrong = 0;
    do {
      const work::Content content = work::Look(block.memory, block.bytes, c.at("seed"));
      wrong += content.words - content.equal;
      ++looks;
    } while (NowUs() < end);
    return {{"looks", looks}, {"wrong_words", wrong}};
  }
  Json ReadWord(const Json& c) { return {{"value", work::ReadWord(At(c).memory)}}; }
  Json MemoryInfo(const Json&) {
    const auto [free_bytes, total_bytes] = work::FreeAndTotalBytes();
    return {{"free_bytes", free_bytes}, {"total_bytes", total_bytes}};
  }

  // Forks a child like a data loader: the child has its parent's descriptors, does not use them, and lives on.
  Json ForkChild(const Json&) {
    const pid_t pid = fork();
    if (pid < 0) throw BrokerError{"CLIENT", "fork failed"};
    if (pid == 0) {
      close(STDIN_FILENO);  // lets the parent's peer see the parent's end
      close(STDOUT_FILENO);
      while (true) pause();
    }
    return {{"pid", pid}};
  }
  // Keeps the device busy: fills a block again and again for `ms`.
  Json KeepBusy(const Json& c) {
    const Block& block = At(c);
    const double end = NowUs() + c.at("ms").get<double>() * 1e3;
    uint64_t fills = 0;
    while (NowUs() < end) {
      work::Fill(block.memory, block.bytes, ++fills, nullptr);
      work::Wait(nullptr);
    }
    return {{"fills", fills}};
  }

  // ---- Benchmarks ----

  Json BenchPair(const Json& c) {  // "of": own, segment or block; takes and gives back, `count` times
    const std::string of = c.at("of");
    const uint64_t bytes = c.at("bytes");
    const int count = c.at("count");
    std::vector<double> take;
    std::vector<double> give;
    take.reserve(static_cast<size_t>(count));
    give.reserve(static_cast<size_t>(count));
    for (int i = -2; i < count; ++i) {  // the first two rounds warm up
      void* memory = nullptr;
      const double start = NowUs();
      if (of == "own") {
        memory = work::Allocate(bytes);
      } else if (of == "segment") {
        Check(vrambroker_lease_segment(client_, bytes, 0, &memory));
      } else {
        Check(vrambroker_malloc(client_, bytes, 0, &memory));
      }
      const double middle = NowUs();
      if (of == "own") {
        work::Release(memory);
      } else if (of == "segment") {
        Check(vrambroker_return_segment(client_, memory));
      } else {
        Check(vrambroker_free(client_, memory));
      }
      const double end = NowUs();
      if (i < 0) continue;
      take.push_back(middle - start);
      give.push_back(end - middle);
    }
    return {{"take", Percentiles(take)}, {"give", Percentiles(give)}};
  }
  Json BenchCopy(const Json& c) {
    const Block& to = blocks_.at(c.at("to"));
    const Block& from = blocks_.at(c.at("from"));
    return {{"gigabytes_per_second", work::CopyGigabytesPerSecond(to.memory, from.memory, to.bytes, c.at("times"))}};
  }

  // ---- Commands that only a GPU has ----

  Json Crash(const Json&) { return {{"error", work::Crash()}}; }
  Json BeginCapture(const Json& c) {
    work::BeginCapture(StreamOf(c), c.at("mode"));
    return Json::object();
  }
  Json EndCapture(const Json& c) { return {{"result", work::EndCapture(StreamOf(c))}}; }

  vrambroker_client* client_ = nullptr;
  std::vector<std::string> texts_;  // texts of the options
  std::vector<work::Stream> streams_ = {nullptr};
  std::map<int, Block> blocks_;
  std::vector<Block> many_;
  int last_block_ = 0;
};

const std::map<std::string, GpuClient::Command>& GpuClient::Commands() {
  static const auto* const commands = new std::map<std::string, Command>{
      {"connect", &GpuClient::Connect},
      {"disconnect", &GpuClient::Disconnect},
      {"status", &GpuClient::Status},
      {"malloc", &GpuClient::Malloc},
      {"lease", &GpuClient::Lease},
      {"own_malloc", &GpuClient::OwnMalloc},
      {"free", &GpuClient::Free},
      {"record_stream", &GpuClient::RecordStream},
      {"empty_cache", &GpuClient::EmptyCache},
      {"stats", &GpuClient::Stats},
      {"lease_many", &GpuClient::LeaseMany},
      {"look_at_many", &GpuClient::LookAtMany},
      {"return_many", &GpuClient::ReturnMany},
      {"new_stream", &GpuClient::NewStream},
      {"done", &GpuClient::Done},
      {"wait", &GpuClient::Wait},
      {"fill", &GpuClient::Fill},
      {"spin", &GpuClient::Spin},
      {"increment", &GpuClient::Increment},
      {"look", &GpuClient::Look},
      {"watch", &GpuClient::Watch},
      {"read_word", &GpuClient::ReadWord},
      {"memory_info", &GpuClient::MemoryInfo},
      {"fork_child", &GpuClient::ForkChild},
      {"keep_busy", &GpuClient::KeepBusy},
      {"bench_pair", &GpuClient::BenchPair},
      {"bench_copy", &GpuClient::BenchCopy},
      {"crash", &GpuClient::Crash},
      {"begin_capture", &GpuClient::BeginCapture},
      {"end_capture", &GpuClient::EndCapture},
  };
  return *commands;
}

}  // namespace

int main() {
  GpuClient client;
  std::string line;
  while (std::getline(std::cin, line)) {
    Json answer;
    try {
      answer = client.Do(Json::parse(line));
      answer["ok"] = true;
    } catch (const BrokerError& error) {
      answer = {{"ok", false}, {"code", error.code}, {"message", error.message}};
    } catch (const work::NeedsGpu& error) {
      answer = {{"ok", false}, {"code", "NEEDS_GPU"}, {"message", error.what()}};
    } catch (const std::exception& error) {  // an error of CUDA, or a command without a needed field
      answer = {{"ok", false}, {"code", "CLIENT"}, {"message", error.what()}};
    }
    std::cout << answer.dump() << std::endl;
  }
  _exit(0);
}
