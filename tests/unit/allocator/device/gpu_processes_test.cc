// SPDX-License-Identifier: Apache-2.0
#include "allocator/device/gpu_processes.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

namespace vrambroker {
namespace {

using ::testing::HasSubstr;

// Makes records like an NVML function: `bytes` each, in a larger buffer.
std::vector<char> Records(size_t bytes, const std::vector<GpuProcess>& processes) {
  std::vector<char> records(1024, kUnwritten);
  for (size_t i = 0; i < processes.size(); ++i) {
    char* const record = records.data() + i * bytes;
    std::memset(record, 0, bytes);
    std::memcpy(record, &processes[i].pid, sizeof(uint32_t));
    std::memcpy(record + 8, &processes[i].bytes, sizeof(uint64_t));
    if (bytes >= 24) std::memset(record + 16, 0xFF, 8);  // no GPU instance
  }
  return records;
}

TEST(GpuProcessesTest, RecordsOfEveryDriverAreRead) {
  for (const size_t bytes : {16, 24, 32}) {
    const std::vector<char> records = Records(bytes, {{.pid = 7, .bytes = 1 << 20}, {.pid = 70000, .bytes = 3}});
    const absl::StatusOr<std::vector<GpuProcess>> processes = ReadProcessRecords(records, 2);
    ASSERT_TRUE(processes.ok()) << bytes << ": " << processes.status();
    ASSERT_EQ(processes->size(), 2u);
    EXPECT_EQ((*processes)[0].pid, 7);
    EXPECT_EQ((*processes)[0].bytes, 1u << 20);
    EXPECT_EQ((*processes)[1].pid, 70000);
    EXPECT_EQ((*processes)[1].bytes, 3u);
  }
  EXPECT_TRUE(ReadProcessRecords({}, 0)->empty());
}

TEST(GpuProcessesTest, AnUnknownLayoutIsAnErrorAndNotANumber) {
  for (const size_t bytes : {20, 40}) {
    const absl::Status status = ReadProcessRecords(Records(bytes, {{.pid = 7}, {.pid = 8}}), 2).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInternal) << bytes;
    EXPECT_THAT(std::string(status.message()), HasSubstr("no layout that is known"));
  }
  EXPECT_EQ(ReadProcessRecords(Records(24, {}), 2).status().code(), absl::StatusCode::kInternal) << "nothing written";
}

TEST(GpuProcessesTest, AGpuThatDoesNotTellByProcess) {
  const absl::Status status = ReadProcessRecords(Records(24, {{.pid = 7, .bytes = ~0ULL}}), 1).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented);
}

}  // namespace
}  // namespace vrambroker
