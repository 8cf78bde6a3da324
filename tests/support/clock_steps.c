// SPDX-License-Identifier: Apache-2.0
//
// Plays a system clock that people or NTP set all the time: preloaded (LD_PRELOAD), or linked into a program.
// $VRAMBROKER_TEST_CLOCK_STEPS lists offsets in seconds, "0,3600,-3600"; the clock goes to the next offset every
// quarter of a second. With "back" the clock goes back an hour at each reading. Without the variable the clock is the
// system's. The file changes the time that programs read, and leaves the kernel's timers alone: a program that computes
// the time of a wake-up from this clock waits for too long, or never wakes.
#define _GNU_SOURCE
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

enum { kMaxSteps = 16, kStepMilliseconds = 250 };

static long ReadSteps(const char* text, long* steps) {
  long count = 0;
  while (*text != '\0' && count < kMaxSteps) {
    char* end = NULL;
    steps[count++] = strtol(text, &end, 10);
    text = *end == ',' ? end + 1 : end;
    if (text == end && *text != '\0') break;
  }
  return count;
}

static time_t Offset(void) {
  long steps[kMaxSteps];
  const char* const text = getenv("VRAMBROKER_TEST_CLOCK_STEPS");
  if (text == NULL) return 0;
  if (strcmp(text, "back") == 0) {
    static atomic_long readings;
    return -3600 * (1 + atomic_fetch_add(&readings, 1));
  }
  const long count = ReadSteps(text, steps);
  struct timespec now;
  if (count == 0 || syscall(SYS_clock_gettime, CLOCK_MONOTONIC, &now) != 0) return 0;
  return steps[(now.tv_sec * 1000 + now.tv_nsec / 1000000) / kStepMilliseconds % count];
}

int clock_gettime(clockid_t clock, struct timespec* now) {
  const int result = (int)syscall(SYS_clock_gettime, clock, now);
  if (result == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += Offset();
  return result;
}

int gettimeofday(struct timeval* restrict now, void* restrict zone) {
  (void)zone;
  struct timespec precise;
  if (clock_gettime(CLOCK_REALTIME, &precise) != 0) return -1;
  now->tv_sec = precise.tv_sec;
  now->tv_usec = precise.tv_nsec / 1000;
  return 0;
}

time_t time(time_t* now) {
  struct timespec precise;
  if (clock_gettime(CLOCK_REALTIME, &precise) != 0) return -1;
  if (now != NULL) *now = precise.tv_sec;
  return precise.tv_sec;
}
