// SPDX-License-Identifier: Apache-2.0
//
// Requests that reach the daemon: segments leased and returned, and memory handed from one process to another.
#include <sys/stat.h>

#include <array>
#include <cstdio>
#include <functional>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "allocator/device/host_device.h"
#include "tests/bench/bench_client.h"
#include "tests/bench/fast_path.h"
#include "tests/support/raw_client.h"

namespace vrambroker::bench {
namespace {

// The work of a process that has the device alone.
absl::Status AllocateAndFree(Device& device, uint64_t bytes) {
  const absl::StatusOr<DeviceSegment> segment = device.AllocateSegment(bytes);
  if (!segment.ok()) return segment.status();
  const absl::StatusOr<SegmentHandle> handle = device.ExportSegment(*segment);
  if (!handle.ok()) return handle.status();
  const absl::StatusOr<void*> address = device.OpenHandle(*handle, bytes);
  if (!address.ok()) return address.status();
  if (absl::Status status = device.CloseHandle(*address, bytes); !status.ok()) return status;
  return device.FreeSegment(*segment);
}

testing_support::Arguments DriverLatency(absl::Duration latency) {
  if (latency == absl::ZeroDuration()) return {};
  return {absl::StrCat("--host_driver_latency=", absl::FormatDuration(latency))};
}

// For the name and the title of a table.
std::string Suffix(absl::Duration latency, const char* between) {
  if (latency == absl::ZeroDuration()) return "";
  return absl::StrCat(between, "driver latency ", absl::FormatDuration(latency));
}

// Returns the folder of the sockets of a new claim.
absl::StatusOr<std::string> MakeClaim(const std::string& socket_dir) {
  absl::StatusOr<testing_support::RawClient> raw = testing_support::RawClient::Connect(socket_dir);
  if (!raw.ok()) return raw.status();
  v1::CreateClaimRequest request;
  request.set_name("bench");
  v1::CreateClaimResponse response;
  absl::Status status =
      testing_support::RawClient::Call(raw->admin(), &v1::Admin::Stub::CreateClaim, request, &response);
  if (!status.ok()) return status;
  return response.claim().socket_dir();
}

absl::Status LeaseAndReturn(Client& client, uint64_t bytes) {
  const absl::StatusOr<void*> segment = client.LeaseSegment(bytes);
  return segment.ok() ? client.ReturnSegment(*segment) : segment.status();
}

}  // namespace

absl::Status MeasureMisses(const Settings& settings, absl::Duration latency, nlohmann::json* json) {
  // The small daemon's idle segments must go before another size fits, so each lease reaches the device.
  const testing_support::Arguments flags = DriverLatency(latency);
  const auto daemon = StartDaemon("4GiB", "", flags);
  const auto small = StartDaemon("64MiB", "", flags);
  if (!daemon.ok() || !small.ok()) return daemon.ok() ? small.status() : daemon.status();
  absl::StatusOr<Client> client = ConnectTo((*daemon)->socket_dir());
  absl::StatusOr<Client> tight = ConnectTo((*small)->socket_dir());
  if (!client.ok() || !tight.ok()) return client.ok() ? tight.status() : client.status();
  const absl::StatusOr<std::string> claim = MakeClaim((*daemon)->socket_dir());
  if (!claim.ok()) return claim.status();
  absl::StatusOr<Client> claimed = ConnectTo(*claim);
  if (!claimed.ok()) return claimed.status();
  const absl::StatusOr<std::unique_ptr<BenchClient>> rpc = BenchClient::Connect((*daemon)->socket_dir(), Way::kEmpty);
  if (!rpc.ok()) return rpc.status();
  const std::unique_ptr<Device> device = MakeHostDevice(0, 4096 * kMiB, absl::ToChronoNanoseconds(latency));

  struct WayToMiss {
    const char* name;
    std::function<absl::Status()> pair;
    std::vector<double> us = {};
  };
  bool odd = false;
  std::vector<WayToMiss> ways = {
      {"two empty calls", [&] { return (*rpc)->Pair(); }},
      {"the bare device, 32 MiB", [&] { return AllocateAndFree(*device, 32 * kMiB); }},
      {"lease and return, 2 MiB, idle in the daemon", [&] { return LeaseAndReturn(*client, 2 * kMiB); }},
      {"lease and return, 2 MiB, idle in the daemon, in a claim", [&] { return LeaseAndReturn(*claimed, 2 * kMiB); }},
      {"lease and return, 32 MiB, idle in the daemon", [&] { return LeaseAndReturn(*client, 32 * kMiB); }},
      {"lease and return, 40 MiB, from the device",
       [&] { return LeaseAndReturn(*tight, ((odd = !odd) ? 40 : 42) * kMiB); }},
      {"allocate and free a block of 32 MiB, empty the cache",
       [&]() -> absl::Status {
         absl::StatusOr<Buffer> buffer = client->Allocate(32 * kMiB);
         if (!buffer.ok()) return buffer.status();
         if (absl::Status status = buffer->Reset(); !status.ok()) return status;
         return client->EmptyCache().status();
       }},
  };
  constexpr int kPairs = 20;
  for (int round = -1; round < settings.rounds; ++round) {  // -1: a warm-up
    for (size_t i = 0; i < ways.size(); ++i) {
      WayToMiss& way = ways[(i + static_cast<size_t>(round + 1)) % ways.size()];
      const int64_t from = NowNs();
      for (int pair = 0; pair < kPairs; ++pair) {
        if (absl::Status status = way.pair(); !status.ok()) return status;
      }
      if (round >= 0) way.us.push_back(static_cast<double>(NowNs() - from) * 1e-3 / kPairs);
    }
  }
  Table table(json, absl::StrCat("misses", Suffix(latency, ", ")),
              absl::StrCat("Misses: a pair, median", Suffix(latency, "; simulated ")),
              {"way", "us", "best", "times two empty calls", "times the bare device"});
  const double empty = Quantile(ways[0].us, 0.5);
  const double bare = Quantile(ways[1].us, 0.5);
  for (const WayToMiss& way : ways) {
    const double us = Quantile(way.us, 0.5);
    table.Row({way.name, {us, 1}, {Quantile(way.us, 0), 1}, {us / empty, 2}, {us / bare, 2}});
  }
  return absl::OkStatus();
}

// Process A gives its memory back and writes a byte into a FIFO. Process B reads the byte and takes the memory.
absl::Status MeasureHandovers(const Settings& settings, absl::Duration latency, nlohmann::json* json) {
  // The device has room for the memory of one process at a time.
  const auto daemon = StartDaemon("96MiB", "", DriverLatency(latency));
  if (!daemon.ok()) return daemon.status();
  const std::string fifo = (*daemon)->socket_dir() + "/handover";
  if (mkfifo(fifo.c_str(), 0600) != 0) return absl::ErrnoToStatus(errno, "mkfifo failed");
  const auto a = StartWorker(**daemon);
  const auto b = StartWorker(**daemon);
  if (!a.ok() || !b.ok()) return a.ok() ? b.status() : a.status();
  for (ChildProcess* worker : {a->get(), b->get()}) {
    for (const std::string& command :
         {std::string("connect"), absl::StrCat("latency ", absl::ToInt64Microseconds(latency))}) {
      if (absl::Status status = Ask(*worker, command).status(); !status.ok()) return status;
    }
  }

  struct Kind {
    const char* name;
    const char* what;
    bool touch;
    std::vector<double> us = {};
  };
  std::array<Kind, 5> kinds = {{
      {"the signal alone", "nothing", false},
      {"through the broker", "buffer", false},
      {"through the device", "device", false},
      {"through the broker, all of it written before and after", "buffer", true},
      {"through the device, all of it written before and after", "device", true},
  }};
  for (int i = 0; i < settings.handovers; ++i) {
    for (Kind& kind : kinds) {
      const std::string words = absl::StrCat(kind.what, " ", 64 * kMiB, " ", kind.touch ? 1 : 0, " ", fifo);
      if (const auto answer = Ask(**a, "take " + words); !answer.ok() || *answer != "ok") {
        return absl::InternalError(absl::StrCat("take: ", answer.value_or(answer.status().ToString())));
      }
      if (absl::Status status = (*b)->WriteLine("wait_and_take " + words); !status.ok()) return status;
      const absl::StatusOr<std::string> given = Ask(**a, "give " + words);
      const absl::StatusOr<std::string> taken = (*b)->ReadLine();
      int64_t from = 0;
      int64_t until = 0;
      if (!given.ok() || !taken.ok() || !absl::SimpleAtoi(*given, &from) || !absl::SimpleAtoi(*taken, &until)) {
        return absl::InternalError(absl::StrCat("handing over: ", given.value_or(given.status().ToString()), ", ",
                                                taken.value_or(taken.status().ToString())));
      }
      kind.us.push_back(static_cast<double>(until - from) * 1e-3);
      if (absl::Status status = Ask(**b, "drop").status(); !status.ok()) return status;
    }
  }
  Table table(json, absl::StrCat("handovers", Suffix(latency, ", ")),
              absl::StrCat("64 MiB from process A, which frees it, to process B, which can use it",
                           Suffix(latency, "; simulated ")),
              {"way", "us, median", "p99", "times the device"});
  for (size_t i = 0; i < kinds.size(); ++i) {
    const double us = Quantile(kinds[i].us, 0.5);
    const Kind& device = kinds[kinds[i].touch ? 4 : 2];
    table.Row({kinds[i].name, {us, 0}, {Quantile(kinds[i].us, 0.99), 0}, {us / Quantile(device.us, 0.5), 2}});
  }
  return absl::OkStatus();
}

}  // namespace vrambroker::bench
