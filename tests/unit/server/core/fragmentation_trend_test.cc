// SPDX-License-Identifier: Apache-2.0
//
// Realistic programs, with a look every two seconds as in the daemon: programs whose fragmentation grows, and programs
// that only look like growing fragmentation.
#include "server/core/fragmentation_trend.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <optional>
#include <random>
#include <utility>

#include "allocator/base/bytes.h"

namespace vrambroker {
namespace {

using std::chrono::milliseconds;

constexpr double kMinute = 60;  // in seconds
constexpr double kHour = 3600;
constexpr double kMiB = 1 << 20;
constexpr double kGiB = 1 << 30;
constexpr uint64_t kLimit = 40_GiB;

// Returns a program's use at a time in seconds, without the peak.
using Program = std::function<HeapUse(double time)>;

HeapUse Uses(double allocated, double held) {
  return {.allocated_bytes = static_cast<uint64_t>(allocated), .held_bytes = static_cast<uint64_t>(held)};
}

// Returns the position within a step of `step` seconds, from 0 to 1. The middle of a step uses the most memory.
double Within(double time, double step) {
  return std::fmod(time, step) / step;
}

// Returns the use of a training step: memory that stays allocated, and additional memory in the middle of the step. The
// rest of the step holds a part of the additional memory's segments.
HeapUse Training(double time, double step, double stays, double more, double fragmented) {
  const double now = 1 - std::abs(2 * Within(time, step) - 1);
  return Uses(stays + more * now, stays + more * (0.5 + now / 2) + fragmented);
}

// Models training whose steps take 3.1 s and differ, like sequences of random lengths.
class VariedTraining {
 public:
  // `sigma` is the sigma of the length's logarithm. All standard libraries give the same lengths, but for rounding.
  VariedTraining(uint64_t seed, double sigma) : random_(seed), sigma_(sigma) {}

  HeapUse operator()(double time, double leaked, double fragmented) {
    if (std::exchange(step_, std::floor(time / kStep)) != step_) length_ = std::min(3.0, std::exp(sigma_ * Normal()));
    return Training(time, kStep, 2 * kGiB + leaked, length_ * 4 * kGiB, length_ * 500 * kMiB + fragmented);
  }

 private:
  static constexpr double kStep = 3.1;

  // Adds up twelve uniform numbers: Irwin and Hall's approximation.
  double Normal() {
    double sum = -6;
    for (int i = 0; i < 12; ++i) sum += static_cast<double>(random_() >> 11) * 0x1p-53;
    return sum;
  }

  std::mt19937_64 random_;
  const double sigma_;
  double step_ = -1;
  double length_ = 1;
};

class FragmentationTrendTest : public ::testing::Test {
 protected:
  // Runs `program` for `length` seconds. The peak covers every moment, not only moments of looks.
  void Run(double length, const Program& program) {
    const double end = now_ + length;
    while (now_ < end) {
      for (int i = 0; i < 20; ++i) {
        peak_ = std::max(peak_, program(now_).allocated_bytes);
        now_ += 0.1;
      }
      HeapUse use = program(now_);
      peak_ = std::max(peak_, use.allocated_bytes);
      use.allocated_peak_bytes = peak_;
      use.time = SteadyTime(std::chrono::duration_cast<SteadyTime::duration>(std::chrono::duration<double>(now_)));
      trend_.Add(use);
      ++samples_;
      if (trend_.bytes_per_second() == 0) {
        since_ = now_;
        continue;
      }
      ++with_trend_;
      rates_ += trend_.bytes_per_second();
      if (now_ - since_ >= kAlertAfter) {
        ++alerted_;
        if (!first_alert_.has_value()) first_alert_ = now_;
      }
      if (!first_.has_value()) first_ = now_;
      last_ = now_;
      longest_ = std::max(longest_, now_ - since_);
    }
  }
  void StartAgain() {
    trend_ = FragmentationTrend();
    now_ = since_ = 1000;
    peak_ = 0;
    first_ = first_alert_ = std::nullopt;
    samples_ = with_trend_ = alerted_ = 0;
    rates_ = 0;
    longest_ = 0;
  }
  // Returns the share of samples at which an alert fires.
  double Alerted() const { return static_cast<double>(alerted_) / samples_; }
  void ExpectNever() {
    EXPECT_EQ(first_, std::nullopt) << "a trend after " << first_.value_or(0) << " s, the last time after " << last_
                                    << " s, of " << trend_.bytes_per_second() << " bytes a second in the end";
  }
  void ExpectRate(double bytes_per_second, double tolerance) {
    EXPECT_NEAR(trend_.bytes_per_second(), bytes_per_second, tolerance * bytes_per_second);
  }

  static constexpr double kAlertAfter = 5 * kMinute;  // as in deploy/prometheus/vrambroker.rules.yml

  FragmentationTrend trend_;
  double now_ = 1000;  // in seconds
  uint64_t peak_ = 0;
  std::optional<double> first_;  // time of the first trend
  double last_ = 0;
  double since_ = 1000;  // last time without a trend
  double longest_ = 0;   // longest time with a trend, in seconds
  int samples_ = 0;
  int with_trend_ = 0;
  double rates_ = 0;  // sum over samples with a trend
  int alerted_ = 0;
  std::optional<double> first_alert_;
};

// ---- Fragmentation that grows ----

TEST_F(FragmentationTrendTest, StepsOfTrainingThatLeaveMoreAndMoreHoles) {
  // The program adds a segment of 20 MiB every 12 s: 100 MiB a minute.
  const auto program = [](double time) {
    return Training(time, /*step=*/7.3, 2 * kGiB, 8 * kGiB, 20 * kMiB * std::floor((time - 1000) / 12));
  };
  Run(20 * kMinute, program);
  ExpectRate(100 * kMiB / kMinute, 0.15);
  ASSERT_TRUE(first_.has_value());
  EXPECT_LE(*first_, 1000 + 12 * kMinute) << "seen soon";
  EXPECT_LE(since_, 1000 + 13 * kMinute) << "and soon without a break";
  const std::optional<double> left = trend_.SecondsUntil(10_GiB + 6100_MiB);
  // Growth has taken 2000 MiB of the 6100 MiB above the top of the steps: 41 minutes remain.
  ASSERT_TRUE(left.has_value());
  EXPECT_NEAR(*left, 41 * kMinute, 8 * kMinute);
}

TEST_F(FragmentationTrendTest, TheTimeThatIsLeftBecomesLess) {
  const auto program = [](double time) { return Training(time, 0.7, 2 * kGiB, 8 * kGiB, 2 * kMiB * (time - 1000)); };
  Run(20 * kMinute, program);
  const std::optional<double> before = trend_.SecondsUntil(kLimit);
  Run(10 * kMinute, program);
  const std::optional<double> after = trend_.SecondsUntil(kLimit);
  ASSERT_TRUE(before.has_value() && after.has_value());
  EXPECT_NEAR(*before - *after, 10 * kMinute, 2 * kMinute);
  EXPECT_EQ(trend_.SecondsUntil(1_GiB), 0) << "by now";
}

TEST_F(FragmentationTrendTest, StepsThatDifferAndLeaveMoreAndMoreHoles) {
  const auto expect = [&](double sigma, double growth, double first, double share) {  // MiB a minute, minutes
    for (uint64_t seed = 0; seed < 6; ++seed) {
      SCOPED_TRACE(testing::Message() << "sigma " << sigma << ", " << growth << " MiB a minute, seed " << seed);
      StartAgain();
      VariedTraining training(seed, sigma);
      Run(4 * kHour, [&](double time) { return training(time, 0, growth * kMiB * (time - 1000) / kMinute); });
      ASSERT_TRUE(first_alert_.has_value());
      EXPECT_LE(*first_alert_, 1000 + first * kMinute);
      EXPECT_GE(Alerted(), share);
      EXPECT_NEAR(rates_ / with_trend_, growth * kMiB / kMinute, 0.15 * growth * kMiB / kMinute);
    }
  };
  expect(0.05, 100, 30, 0.85);
  expect(0.1, 100, 30, 0.8);
  expect(0.2, 100, 40, 0.75);
  expect(0.3, 100, 45, 0.6);
  expect(0.3, 200, 35, 0.75);
  expect(0.3, 500, 30, 0.8);
}

TEST_F(FragmentationTrendTest, AHeapThatStaysAsTheLongestStepNeedsIt) {
  for (const double sigma : {0.1, 0.2, 0.3}) {
    for (uint64_t seed = 0; seed < 6; ++seed) {
      SCOPED_TRACE(testing::Message() << "sigma " << sigma << ", seed " << seed);
      StartAgain();
      VariedTraining training(seed, sigma);
      uint64_t most = 0;
      Run(4 * kHour, [&](double time) {
        HeapUse use = training(time, 0, 0);
        most = std::max(most, use.held_bytes);
        use.held_bytes = most + static_cast<uint64_t>(100 * kMiB * (time - 1000) / kMinute);
        return use;
      });
      EXPECT_GE(Alerted(), 0.8);
      EXPECT_LE(first_alert_.value_or(1e9), 1000 + 35 * kMinute);
      EXPECT_NEAR(rates_ / with_trend_, 100 * kMiB / kMinute, 15 * kMiB / kMinute);
    }
  }
}

TEST_F(FragmentationTrendTest, OneStepInBetweenThatIsFarLonger) {
  Run(2 * kHour, [](double time) {
    const bool is_long = std::fmod(time - 1000, 20 * kMinute) >= 20 * kMinute - 3.1;
    return Training(time, 3.1, 2 * kGiB, is_long ? 20 * kGiB : 8 * kGiB, 2 * kMiB * (time - 1000));
  });
  EXPECT_LE(first_alert_.value_or(1e9), 1000 + 20 * kMinute);
  EXPECT_GE(Alerted(), 0.75);
}

TEST_F(FragmentationTrendTest, AFewLargeSegments) {
  Run(40 * kMinute, [](double time) {
    return Training(time, 3.1, 2 * kGiB, 8 * kGiB, kGiB * std::floor((time - 1000) / (5 * kMinute)));
  });
  ExpectRate(kGiB / (5 * kMinute), 0.25);
}

TEST_F(FragmentationTrendTest, EvaluationsInBetween) {
  Run(kHour, [](double time) {
    const double fragmented = 2 * kMiB * (time - 1000);
    return std::fmod(time, 6 * kMinute) < 3 * kMinute ? Training(time, 3.1, 2 * kGiB, 8 * kGiB, fragmented)
                                                      : Training(time, 1.3, 2 * kGiB, kGiB, fragmented);
  });
  ExpectRate(2 * kMiB, 0.25);
  EXPECT_LE(since_, 1000 + 24 * kMinute) << "a trend in each phase from then on";
}

TEST_F(FragmentationTrendTest, EvaluationsInBetweenThatLeaveFewerHoles) {
  Run(2 * kHour, [](double time) {
    const double fragmented = 2 * kMiB * (time - 1000);
    return std::fmod(time, 15 * kMinute) < 9 * kMinute ? Training(time, 3.1, 2 * kGiB, 8 * kGiB, fragmented + 3 * kGiB)
                                                       : Training(time, 1.3, 2 * kGiB, 2 * kGiB, fragmented);
  });
  EXPECT_GE(Alerted(), 0.5) << "other use is not compared";
  EXPECT_NEAR(rates_ / with_trend_, 2 * kMiB, 0.25 * kMiB);
}

TEST_F(FragmentationTrendTest, StepsThatHoldNothingInBetween) {
  Run(kHour, [](double time) {
    return Within(time, 4.7) < 0.4 ? Uses(kMiB, kMiB) : Uses(8 * kGiB, 9 * kGiB + 2 * kMiB * (time - 1000));
  });
  EXPECT_LE(first_.value_or(1e9), 1000 + 10 * kMinute);
  ExpectRate(2 * kMiB, 0.1);
}

TEST_F(FragmentationTrendTest, StepsWhoseTopsNoSampleSees) {
  // Resembles ALeakWhoseStepsAreSeenAtTheirLowestAlone, but the program fragments more than it leaks.
  Run(kHour, [](double time) {
    const double leaked = kMiB * (time - 1000) / 10;
    const bool low = Within(time - 1000 + 0.05, 2.0) < 0.1;
    return Uses((low ? 2 * kGiB : 10 * kGiB) + (low ? 0 : leaked), 11 * kGiB + 20 * leaked);
  });
  EXPECT_GE(Alerted(), 0.5);
  ExpectRate(1.9 * kMiB, 0.1);
}

TEST_F(FragmentationTrendTest, WhatIsFreedMeanwhileDoesNotAddToIt) {
  Run(20 * kMinute, [](double time) {
    const double freed = kMiB * (time - 1000);
    return Uses(20 * kGiB - freed, 22 * kGiB + 2 * freed);
  });
  ExpectRate(2 * kMiB, 0.01);
}

TEST_F(FragmentationTrendTest, WhatWasHeldLongAgoIsForgotten) {
  Run(30 * kMinute, [](double time) { return Training(time, 3.1, 2 * kGiB, 8 * kGiB, 6 * kMiB * (time - 1000)); });
  Run(45 * kMinute, [](double time) { return Training(time, 3.1, 2 * kGiB, 8 * kGiB, 0); });
  EXPECT_EQ(trend_.bytes_per_second(), 0);
  const double since = now_;
  Run(15 * kMinute, [&](double time) { return Training(time, 3.1, 2 * kGiB, 8 * kGiB, 2 * kMiB * (time - since)); });
  ExpectRate(2 * kMiB, 0.15);
}

TEST_F(FragmentationTrendTest, AfterHoursWithout) {
  Run(3 * kHour, [](double time) { return Training(time, 7.3, 2 * kGiB, 8 * kGiB, 0); });
  ExpectNever();
  const double since = now_;
  Run(15 * kMinute, [&](double time) { return Training(time, 7.3, 2 * kGiB, 8 * kGiB, 2 * kMiB * (time - since)); });
  ASSERT_TRUE(first_.has_value());
  EXPECT_LE(*first_, since + 12 * kMinute);
  ExpectRate(2 * kMiB, 0.15);
}

TEST_F(FragmentationTrendTest, OfALeakThatFragmentsOnlyWhatIsNotAllocatedCounts) {
  Run(20 * kMinute, [](double time) {
    const double leaked = kMiB * (time - 1000);
    return Training(time, 3.1, 20 * kGiB + leaked, 2 * kGiB, 3 * kMiB * (time - 1000));
  });
  ExpectRate(3 * kMiB, 0.2);
  const std::optional<double> left = trend_.SecondsUntil(22_GiB + 4800_MiB + 2400_MiB);
  ASSERT_TRUE(left.has_value());
  EXPECT_NEAR(*left, 10 * kMinute, 2 * kMinute) << "the leak uses its room up, too: 4 MiB a second in all";
}

TEST_F(FragmentationTrendTest, WindowsOfAnotherLength) {
  trend_ = FragmentationTrend(milliseconds(5000));
  Run(2 * kMinute, [](double time) { return Training(time, 0.9, 2 * kGiB, 8 * kGiB, 20 * kMiB * (time - 1000)); });
  ExpectRate(20 * kMiB, 0.25);
}

TEST_F(FragmentationTrendTest, OfTheHugest) {
  constexpr auto kMost = static_cast<double>(std::numeric_limits<uint64_t>::max() - (uint64_t{1} << 20));
  Run(20 * kMinute, [](double time) { return Uses(kMost / 4, kMost / 2 * (1 + (time - 1000) / kHour)); });
  EXPECT_NEAR(trend_.bytes_per_second() * kHour, kMost / 2, kMost / 20);
  const std::optional<double> left = trend_.SecondsUntil(std::numeric_limits<uint64_t>::max());
  ASSERT_TRUE(left.has_value());
  EXPECT_NEAR(*left, 40 * kMinute, 4 * kMinute);
}

// ---- Use without a trend ----

TEST_F(FragmentationTrendTest, NothingYet) {
  EXPECT_EQ(trend_.bytes_per_second(), 0);
  EXPECT_EQ(trend_.SecondsUntil(0), std::nullopt);
  EXPECT_EQ(trend_.SecondsUntil(kLimit), std::nullopt);
}

TEST_F(FragmentationTrendTest, TheSameInEachStep) {
  for (const double step : {0.31, 2.0, 7.3, 45.0}) {
    Run(kHour, [&](double time) { return Training(time, step, 2 * kGiB, 8 * kGiB, kGiB); });
  }
  ExpectNever();
}

TEST_F(FragmentationTrendTest, StartingUp) {
  // The program reads a model for ten minutes. The first steps then need more and more: caches, an optimizer, a longer
  // batch.
  Run(3 * kHour, [](double time) {
    const double at = time - 1000;
    const double model = 20 * kGiB * std::min(1.0, at / (10 * kMinute));
    const double warm = std::min(1.0, std::max(0.0, at - 10 * kMinute) / (2 * kMinute));
    return at < 10 * kMinute ? Uses(model, model + model / 10)
                             : Training(time, 5.3, model, 8 * kGiB * warm, 3 * kGiB * warm + 2 * kGiB);
  });
  ExpectNever();
}

TEST_F(FragmentationTrendTest, ALeak) {
  // Tensors of 3 MiB leak in segments of 20 MiB, also at the top of each step.
  Run(2 * kHour, [](double time) {
    const double leaked = 3 * kMiB * std::floor((time - 1000) / 2.1);
    HeapUse use = Training(time, 7.3, 2 * kGiB, 8 * kGiB, 0);
    use.allocated_bytes += static_cast<uint64_t>(leaked);
    use.held_bytes += static_cast<uint64_t>(20 * kMiB * std::ceil(leaked / (18 * kMiB)) * 0.95);
    return use;
  });
  ExpectNever();
}

TEST_F(FragmentationTrendTest, ALeakWhoseStepsAreSeenAtTheirLowestAlone) {
  // A step is as long as the time between looks: the daemon sees 2 GiB of 10 GiB, and the memory that steps leave held.
  // Only the peak tells of the larger allocation.
  Run(kHour, [](double time) {
    const double leaked = kMiB * (time - 1000);
    const bool low = Within(time - 1000 + 0.05, 2.0) < 0.1;
    return Uses((low ? 2 * kGiB : 10 * kGiB) + (low ? 0 : leaked), 11 * kGiB + leaked);
  });
  ExpectNever();
}

TEST_F(FragmentationTrendTest, AModelThatGrows) {
  Run(3 * kHour, [](double time) {
    const double layers = std::floor((time - 1000) / (4 * kMinute));
    return Training(time, 3.1, 2 * kGiB + kGiB * layers, 4 * kGiB, 0);
  });
  ExpectNever();
}

TEST_F(FragmentationTrendTest, PhasesWithMoreAndMoreInUse) {
  for (int phase = 1; phase <= 6; ++phase) {
    Run(6 * kMinute, [&](double time) { return Training(time, 3.1, 2 * kGiB, 4 * kGiB * phase, kGiB * phase); });
  }
  ExpectNever();
}

TEST_F(FragmentationTrendTest, APhaseWithLessInUse) {
  Run(20 * kMinute, [&](double time) { return Training(time, 3.1, 2 * kGiB, 8 * kGiB, 2 * kGiB); });
  Run(kHour, [&](double time) { return Training(time, 3.1, 2 * kGiB, kGiB, 9 * kGiB); });
  ExpectNever();
}

TEST_F(FragmentationTrendTest, AJump) {
  Run(kHour,
      [](double time) { return Training(time, 3.1, 2 * kGiB, 8 * kGiB, time < 1000 + 30 * kMinute ? 0 : 5 * kGiB); });
  ExpectNever();
}

TEST_F(FragmentationTrendTest, TwoJumps) {
  Run(kHour, [](double time) {
    const double at = time - 1000;
    return Training(time, 3.1, 2 * kGiB, 8 * kGiB,
                    (at < 20 * kMinute ? 0 : 3 * kGiB) + (at < 30 * kMinute ? 0 : 3 * kGiB));
  });
  ExpectNever();
}

TEST_F(FragmentationTrendTest, GrowthThatIsOver) {
  Run(30 * kMinute, [](double time) { return Training(time, 3.1, 2 * kGiB, 8 * kGiB, 2 * kMiB * (time - 1000)); });
  EXPECT_EQ(last_, now_);
  const double ended = now_;
  Run(kHour, [&](double time) { return Training(time, 3.1, 2 * kGiB, 8 * kGiB, 2 * kMiB * (ended - 1000)); });
  EXPECT_EQ(trend_.bytes_per_second(), 0);
  EXPECT_LE(last_, ended + 11 * kMinute) << "a quarter of the longest look";
}

TEST_F(FragmentationTrendTest, TrimsAndFlushes) {
  // The program gives back as much as possible every five minutes, and takes the memory again within a minute or two.
  Run(2 * kHour, [](double time) {
    const double since = std::fmod(time - 1000, 5 * kMinute);
    return Training(time, 3.1, 2 * kGiB, 8 * kGiB, 2 * kGiB * std::min(1.0, since / (2 * kMinute)));
  });
  ExpectNever();
  // The program trims once, and the memory comes back for good.
  const double trimmed = now_;
  Run(kHour, [&](double time) {
    const double since = time - trimmed;
    return Training(time, 3.1, 2 * kGiB, 8 * kGiB, 2 * kGiB * std::min(1.0, std::floor(since / (3 * kMinute)) / 2));
  });
  ExpectNever();
}

TEST_F(FragmentationTrendTest, StepsThatDiffer) {
  // Chance makes a trend now and then, but no trend that lasts until an alert. A leak makes no such trend, either.
  for (const double sigma : {0.02, 0.1, 0.2, 0.3}) {
    for (const double leak : {0.0, 100 * kMiB / kMinute}) {
      SCOPED_TRACE(testing::Message() << "sigma " << sigma << ", a leak of " << leak);
      int with_trend = 0;
      int samples = 0;
      for (uint64_t seed = 0; seed < 6; ++seed) {
        StartAgain();
        VariedTraining training(seed, sigma);
        Run(6 * kHour, [&](double time) { return training(time, leak * (time - 1000), 0); });
        EXPECT_EQ(alerted_, 0) << "seed " << seed;
        with_trend += with_trend_;
        samples += samples_;
      }
      EXPECT_LE(with_trend, samples / 100) << "of " << samples;
    }
  }
}

TEST_F(FragmentationTrendTest, AHeapThatStaysAsItIs) {
  // The longest step so far decides the held memory, and the program leaks: the use goes up and down more than it
  // grows.
  for (const double sigma : {0.1, 0.3}) {
    for (const double leak : {0.0, 100 * kMiB / kMinute}) {
      SCOPED_TRACE(testing::Message() << "sigma " << sigma << ", a leak of " << leak);
      double alerted = 0;
      for (uint64_t seed = 0; seed < 6; ++seed) {
        StartAgain();
        VariedTraining training(seed, sigma);
        uint64_t most = 0;
        Run(6 * kHour, [&](double time) {
          HeapUse use = training(time, leak * (time - 1000), 0);
          const auto leaked = static_cast<uint64_t>(leak * (time - 1000));
          most = std::max(most, use.held_bytes - leaked);
          use.held_bytes = most + leaked;
          return use;
        });
        alerted += Alerted() / 6;
      }
      EXPECT_LE(alerted, leak == 0 ? 0 : 0.03);
    }
  }
}

TEST_F(FragmentationTrendTest, StepsThatAreSeenAlmostAtTheSamePlace) {
  // Looks are almost in phase with the steps: the seen use rises for half an hour, then falls.
  for (const double step : {1.99, 2.002, 2.01, 7.01}) {
    StartAgain();
    Run(4 * kHour, [&](double time) { return Training(time, step, 2 * kGiB, 4 * kGiB, kGiB); });
    EXPECT_EQ(alerted_, 0) << step;
  }
}

TEST_F(FragmentationTrendTest, LessThanASegmentInHalfAnHour) {
  Run(3 * kHour, [](double time) { return Training(time, 3.1, 2 * kGiB, 8 * kGiB, 1024 * (time - 1000)); });
  ExpectNever();
}

TEST_F(FragmentationTrendTest, NothingReserved) {
  Run(kHour, [](double) { return Uses(0, 0); });
  ExpectNever();
}

// ---- Time ----

HeapUse At(int64_t at, uint64_t held) {
  return {.time = SteadyTime(std::chrono::seconds(at)),
          .allocated_bytes = 1_GiB,
          .allocated_peak_bytes = 1_GiB,
          .held_bytes = held};
}

TEST(FragmentationTrendTimeTest, WhatIsNotLaterIsLeftOut) {
  FragmentationTrend trend;
  FragmentationTrend other;
  for (int i = 0; i < 20; ++i) {
    for (FragmentationTrend* each : {&trend, &other})
      each->Add(At(1000 + 60 * i, 2_GiB + static_cast<uint64_t>(i) * 100_MiB));
    other.Add(At(1000 + 60 * i, 30_GiB));
    other.Add(At(i, 30_GiB));
  }
  EXPECT_GT(trend.bytes_per_second(), 0);
  EXPECT_EQ(trend.bytes_per_second(), other.bytes_per_second());
  EXPECT_EQ(trend.SecondsUntil(kLimit), other.SecondsUntil(kLimit));
  EXPECT_NEAR(trend.SecondsUntil(std::numeric_limits<uint64_t>::max()).value_or(0) * trend.bytes_per_second(),
              1.8447e19, 1e16);
}

TEST(FragmentationTrendTimeTest, AMachineThatSlept) {
  FragmentationTrend trend;
  for (int i = 0; i < 20; ++i) trend.Add(At(1000 + 60 * i, 2_GiB));
  for (int i = 0; i < 20; ++i) trend.Add(At(100'000 + 60 * i, 3_GiB));
  EXPECT_EQ(trend.bytes_per_second(), 0);
  for (int i = 20; i < 40; ++i) trend.Add(At(100'000 + 60 * i, 3_GiB + static_cast<uint64_t>(i) * 60_MiB));
  EXPECT_NEAR(trend.bytes_per_second(), 1_MiB, 0.01 * kMiB);
}

}  // namespace
}  // namespace vrambroker
