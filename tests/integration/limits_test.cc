// SPDX-License-Identifier: Apache-2.0
//
// Limits hold to the byte, explain refusals, and take no memory away.
#include <gtest/gtest.h>

#include <vector>

#include "allocator/base/bytes.h"
#include "tests/support/buffers.h"
#include "tests/support/daemon_test.h"
#include "tests/support/raw_client.h"

namespace vrambroker::testing_support {
namespace {

constexpr uint64_t kCapacity = 256_MiB;

class LimitsTest : public DaemonTest {
 protected:
  void SetUp() override { ASSERT_OK(StartDaemon({.capacity = "256MiB"})); }

  // Returns the report of the refusal of `bytes` to `client`.
  static OutOfMemory Refusal(Client& client, uint64_t bytes) {
    const absl::StatusOr<Buffer> buffer = client.Allocate(bytes);
    EXPECT_EQ(buffer.status().code(), absl::StatusCode::kResourceExhausted) << bytes << ": " << buffer.status();
    const std::optional<OutOfMemory> oom = GetOutOfMemory(buffer.status());
    EXPECT_TRUE(oom.has_value()) << "no detail in " << buffer.status();
    return oom.value_or(OutOfMemory());
  }
};

TEST_F(LimitsTest, AByteLimitIsExact) {
  ASSERT_OK_AND_ASSIGN(Client client, Connect("bytes", Limit(uint64_t{64_MiB})));
  EXPECT_EQ(client.limit_bytes(), 64_MiB);
  const OutOfMemory over = Refusal(client, 64_MiB + 1);
  EXPECT_EQ(over.cause, OutOfMemory::Cause::kLimit);
  EXPECT_EQ(over.requested_bytes, 64_MiB + 1);
  EXPECT_EQ(over.segment_bytes, 66_MiB);
  EXPECT_EQ(over.limit_bytes, 64_MiB);
  EXPECT_EQ(over.reserved_bytes, 0u);
  EXPECT_EQ(over.allocated_bytes, 0u);
  EXPECT_EQ(over.device_capacity_bytes, kCapacity);
  EXPECT_EQ(over.device_available_bytes, kCapacity);

  ASSERT_OK_AND_ASSIGN(Buffer all, client.Allocate(64_MiB));
  EXPECT_EQ(all.block_bytes(), 64_MiB);
  Fill(all, 1);
  const OutOfMemory one = Refusal(client, 1);
  EXPECT_EQ(one.cause, OutOfMemory::Cause::kLimit);
  EXPECT_EQ(one.requested_bytes, 1u);
  EXPECT_EQ(one.segment_bytes, 2_MiB);
  EXPECT_EQ(one.limit_bytes, 64_MiB);
  EXPECT_EQ(one.reserved_bytes, 64_MiB);
  EXPECT_EQ(one.allocated_bytes, 64_MiB);
  EXPECT_EQ(one.idle_bytes, 0u);
  EXPECT_EQ(one.device_available_bytes, kCapacity - 64_MiB);
  ASSERT_EQ(one.largest_holders.size(), 1u);
  EXPECT_EQ(one.largest_holders[0].client, "bytes");
  EXPECT_EQ(one.largest_holders[0].reserved_bytes, 64_MiB);
  EXPECT_FALSE(one.advice.empty());

  // Memory from before the refusal is unchanged, and writable.
  EXPECT_TRUE(Holds(all, 1));
  Fill(all, 2);
  EXPECT_TRUE(Holds(all, 2));
  EXPECT_OK(client.status());
  EXPECT_OK(all.Reset());
  EXPECT_OK(client.Allocate(1));
}

TEST_F(LimitsTest, OneByteBelowASegmentIsNotEnough) {
  ASSERT_OK_AND_ASSIGN(Client client, Connect("below", Limit(uint64_t{64_MiB - 1})));
  EXPECT_EQ(Refusal(client, 64_MiB).limit_bytes, 64_MiB - 1);
  EXPECT_OK(client.Allocate(62_MiB));
}

TEST_F(LimitsTest, AFractionIsCutToWholeBytes) {
  ASSERT_OK_AND_ASSIGN(Client half, Connect("half", Limit(0.5)));
  EXPECT_EQ(half.limit_bytes(), kCapacity / 2);
  ASSERT_OK_AND_ASSIGN(Client tenth, Connect("tenth", Limit(0.1)));
  EXPECT_EQ(tenth.limit_bytes(), 26843545u);  // floor(26843545.6)
  ASSERT_OK_AND_ASSIGN(Client none, Connect("none", Limit(0.0)));
  EXPECT_EQ(none.limit_bytes(), 0u);
  EXPECT_EQ(Refusal(none, 1).cause, OutOfMemory::Cause::kLimit);
  ASSERT_OK_AND_ASSIGN(Client more, Connect("more", Limit(uint64_t{1_GiB})));
  EXPECT_EQ(more.limit_bytes(), kCapacity);

  EXPECT_EQ(Refusal(half, kCapacity / 2 + 1).cause, OutOfMemory::Cause::kLimit);
  EXPECT_OK(half.Allocate(kCapacity / 2));
}

TEST_F(LimitsTest, SmallBlocksFillALimitToTheLastOne) {
  ASSERT_OK_AND_ASSIGN(Client client, Connect("small", Limit(uint64_t{4_MiB})));
  std::vector<Buffer> buffers;
  for (uint64_t i = 0; i < 4_MiB / 64_KiB; ++i) {
    ASSERT_OK_AND_ASSIGN(Buffer buffer, client.Allocate(64_KiB));
    Fill(buffer, i);
    buffers.push_back(std::move(buffer));
  }
  const OutOfMemory oom = Refusal(client, 1);
  EXPECT_EQ(oom.reserved_bytes, 4_MiB);
  EXPECT_EQ(oom.allocated_bytes, 4_MiB);
  for (uint64_t i = 0; i < buffers.size(); ++i) EXPECT_TRUE(Holds(buffers[i], i)) << i;
}

TEST_F(LimitsTest, TwoHalvesFillTheDeviceAndAThirdGetsCapacity) {
  ASSERT_OK_AND_ASSIGN(Client first, Connect("first", Limit(0.5)));
  ASSERT_OK_AND_ASSIGN(Client second, Connect("second", Limit(0.5)));
  ASSERT_OK_AND_ASSIGN(Client third, Connect("third", Limit(0.5)));
  ASSERT_OK_AND_ASSIGN(Buffer a, first.Allocate(kCapacity / 2));
  ASSERT_OK_AND_ASSIGN(Buffer b, second.Allocate(kCapacity / 2));
  Fill(a, 1_MiB, 1);
  Fill(b, 1_MiB, 2);
  EXPECT_TRUE(Holds(a, 1_MiB, 1));
  EXPECT_TRUE(Holds(b, 1_MiB, 2));

  const OutOfMemory full = Refusal(third, 1);
  EXPECT_EQ(full.cause, OutOfMemory::Cause::kCapacity);
  EXPECT_EQ(full.requested_bytes, 1u);
  EXPECT_EQ(full.limit_bytes, kCapacity / 2);
  EXPECT_EQ(full.reserved_bytes, 0u);
  EXPECT_EQ(full.device_capacity_bytes, kCapacity);
  EXPECT_EQ(full.device_available_bytes, 0u);
  ASSERT_EQ(full.largest_holders.size(), 2u);
  EXPECT_EQ(full.largest_holders[0].reserved_bytes, kCapacity / 2);

  // Memory that the first client frees stays in that client's cache until another client needs the memory: the third
  // client gets the memory.
  EXPECT_OK(a.Reset());
  EXPECT_OK(third.Allocate(kCapacity / 2));
  EXPECT_TRUE(Holds(b, 1_MiB, 2));
}

TEST_F(LimitsTest, MoreThanTheDeviceHas) {
  ASSERT_OK_AND_ASSIGN(Client client, Connect("huge"));
  for (const uint64_t bytes : {kCapacity + 1, uint64_t{1} << 59, uint64_t{1} << 60, uint64_t{1} << 63, ~uint64_t{0}}) {
    const OutOfMemory oom = Refusal(client, bytes);
    EXPECT_EQ(oom.cause, OutOfMemory::Cause::kLargerThanDevice) << bytes;
    EXPECT_EQ(oom.requested_bytes, bytes);
    EXPECT_EQ(oom.device_capacity_bytes, kCapacity);
    EXPECT_EQ(oom.reserved_bytes, 0u);
  }
  EXPECT_OK(client.Allocate(kCapacity));
}

TEST_F(LimitsTest, EnoughBytesInPiecesIsFragmentation) {
  ASSERT_OK_AND_ASSIGN(Client client, Connect("pieces", Limit(uint64_t{20_MiB})));
  std::vector<Buffer> buffers;
  for (uint64_t i = 0; i < 4; ++i) {
    ASSERT_OK_AND_ASSIGN(Buffer buffer, client.Allocate(5_MiB));
    Fill(buffer, 4_KiB, i);
    buffers.push_back(std::move(buffer));
  }
  EXPECT_OK(buffers[0].Reset());
  EXPECT_OK(buffers[2].Reset());
  const OutOfMemory oom = Refusal(client, 9_MiB);
  EXPECT_EQ(oom.cause, OutOfMemory::Cause::kFragmentation);
  EXPECT_EQ(oom.reserved_bytes, 20_MiB);
  EXPECT_EQ(oom.allocated_bytes, 10_MiB);
  EXPECT_EQ(oom.idle_bytes, 10_MiB);
  EXPECT_EQ(oom.largest_free_block_bytes, 5_MiB);
  EXPECT_TRUE(Holds(buffers[1], 4_KiB, 1));
  EXPECT_TRUE(Holds(buffers[3], 4_KiB, 3));
  // Freed neighbours join: the request then fits.
  EXPECT_OK(buffers[1].Reset());
  EXPECT_OK(client.Allocate(9_MiB));
}

TEST_F(LimitsTest, ALowerLimitTakesNothingAndRefusesGrowth) {
  ASSERT_OK_AND_ASSIGN(Client client, Connect("lowered"));
  ASSERT_OK_AND_ASSIGN(RawClient operator_, RawClient::Connect(dir()));
  ASSERT_OK_AND_ASSIGN(Buffer held, client.Allocate(64_MiB));
  Fill(held, 7);
  ASSERT_OK_AND_ASSIGN(Buffer cached, client.Allocate(32_MiB));

  ASSERT_OK_AND_ASSIGN(const v1::Session lowered, operator_.SetLimit(Ref("lowered"), BytesLimit(40_MiB)));
  EXPECT_EQ(lowered.devices(0).limit_bytes(), 40_MiB);
  EXPECT_EQ(lowered.devices(0).reserved_bytes(), 96_MiB);
  EXPECT_TRUE(WaitFor([&] { return client.limit_bytes() == 40_MiB; })) << "the client is not told";
  EXPECT_TRUE(Holds(held, 7));
  // The client answers in turn: the answer to the lower limit comes before this answer.
  ASSERT_OK(operator_.GetSession(Ref("lowered")));

  // A hit in the cache does not grow the session, so the daemon never refuses the hit, even above the limit.
  EXPECT_OK(cached.Reset());
  ASSERT_OK_AND_ASSIGN(Buffer hit, client.Allocate(32_MiB));
  const OutOfMemory oom = Refusal(client, 1);
  EXPECT_EQ(oom.cause, OutOfMemory::Cause::kLimit);
  EXPECT_EQ(oom.limit_bytes, 40_MiB);
  EXPECT_EQ(oom.reserved_bytes, 96_MiB);
  EXPECT_EQ(oom.allocated_bytes, 96_MiB);
  EXPECT_TRUE(Holds(held, 7));

  ASSERT_OK(operator_.SetLimit(Ref("lowered"), BytesLimit(98_MiB)));
  ASSERT_OK_AND_ASSIGN(Buffer grown, client.Allocate(1));
  EXPECT_EQ(Refusal(client, 2_MiB).reserved_bytes, 98_MiB);
  ASSERT_OK(operator_.SetLimit(Ref("lowered"), FractionLimit(1)));
  EXPECT_TRUE(WaitFor([&] { return client.limit_bytes() == kCapacity; }));
  EXPECT_OK(client.Allocate(2_MiB));
}

// Free memory lies in pieces, but a session above its limit would get no memory from one piece, either.
TEST_F(LimitsTest, AboveALoweredLimitTheLimitIsTheCause) {
  ASSERT_OK_AND_ASSIGN(Client client, Connect("lowered"));
  ASSERT_OK_AND_ASSIGN(RawClient operator_, RawClient::Connect(dir()));
  std::vector<Buffer> buffers;
  for (int i = 0; i < 4; ++i) {
    ASSERT_OK_AND_ASSIGN(Buffer buffer, client.Allocate(5_MiB));
    buffers.push_back(std::move(buffer));
  }
  for (const size_t i : {0, 2}) EXPECT_OK(buffers[i].Reset());
  for (const auto& [limit, cause] :
       {std::pair(20_MiB, OutOfMemory::Cause::kFragmentation), std::pair(10_MiB, OutOfMemory::Cause::kLimit)}) {
    ASSERT_OK(operator_.SetLimit(Ref("lowered"), BytesLimit(limit)));
    const OutOfMemory oom = Refusal(client, 8_MiB);
    EXPECT_EQ(oom.cause, cause) << limit;
    EXPECT_EQ(oom.limit_bytes, limit);
    EXPECT_EQ(oom.reserved_bytes, 20_MiB);
    EXPECT_EQ(oom.allocated_bytes, 10_MiB);
  }
}

TEST_F(LimitsTest, ARefusalGivesTheOwnCacheBackFirst) {
  ASSERT_OK_AND_ASSIGN(Client client, Connect("cache", Limit(uint64_t{64_MiB})));
  ASSERT_OK_AND_ASSIGN(Buffer a, client.Allocate(40_MiB));
  EXPECT_OK(a.Reset());  // 40 MiB stays in the session's cache
  EXPECT_OK(client.Allocate(64_MiB)) << "the cached segment must make room";
}

TEST(PolicyTest, TheDaemonsPolicyCapsWhatIsAskedFor) {
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<DaemonProcess> daemon,
                       DaemonProcess::Start({.config = "session_limit { fraction: 0.25 }"}));
  for (const std::optional<Limit>& limit :
       {std::optional<Limit>(), std::optional<Limit>(Limit(0.5)), std::optional<Limit>(Limit(uint64_t{1_GiB}))}) {
    ASSERT_OK_AND_ASSIGN(
        Client client,
        Client::Connect(
            {.socket_dir = daemon->socket_dir(), .name = "c", .limit = limit, .connect_timeout = kPatience}));
    EXPECT_EQ(client.limit_bytes(), 64_MiB);
    EXPECT_OK(client.Allocate(64_MiB));
    EXPECT_STATUS(client.Allocate(64_MiB + 1), absl::StatusCode::kResourceExhausted, "limit");
  }
}

}  // namespace
}  // namespace vrambroker::testing_support
