/* SPDX-License-Identifier: Apache-2.0
 *
 * The only grammar of sizes, shares and durations, for all programs and libraries: deploy/GLOSSARY.md, "Sizes, shares
 * and durations". Plain C, without the locale, since the preload library compiles the file, too.
 */
#ifndef VRAMBROKER_ALLOCATOR_BASE_AMOUNT_PARSER_H_
#define VRAMBROKER_ALLOCATOR_BASE_AMOUNT_PARSER_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define VRAMBROKER_HIDDEN __attribute__((visibility("hidden")))

enum { AMOUNT_WHY_BYTES = 320 };

/* Each function returns 0, or -1 and fills `why`: "'8X' is not a size: its unit is unknown; write 512MiB, ...". */

/* "8G", "8GiB" (2^30), "24GB" (10^9), "512 mib", "1.5GiB", "2097152". Parts of a byte are dropped. */
VRAMBROKER_HIDDEN int amount_read_size(const char* text, size_t length, uint64_t* bytes, char why[AMOUNT_WHY_BYTES]);

/* "0.4", "40%". From 0 to 1. */
VRAMBROKER_HIDDEN int amount_read_share(const char* text, size_t length, double* share, char why[AMOUNT_WHY_BYTES]);

struct amount_limit {
  int is_share;
  double share;   /* of the capacity */
  uint64_t bytes; /* if not a share */
};

/* A share or a size. Refuses a number from 1 to 1048575 without a unit: "80" may mean 80% or 80GiB. */
VRAMBROKER_HIDDEN int amount_read_limit(const char* text, size_t length, struct amount_limit* limit,
                                        char why[AMOUNT_WHY_BYTES]);

/* "500ms", "30s", "10m", "10min", "2h", "1d", "1h30m", "1.5h", "0". */
VRAMBROKER_HIDDEN int amount_read_duration(const char* text, size_t length, uint64_t* nanoseconds,
                                           char why[AMOUNT_WHY_BYTES]);

/* A duration in milliseconds, rounded up: a short time does not become 0. */
VRAMBROKER_HIDDEN int amount_read_milliseconds(const char* text, size_t length, uint64_t* milliseconds,
                                               char why[AMOUNT_WHY_BYTES]);

#ifdef __cplusplus
}
#endif

#endif /* VRAMBROKER_ALLOCATOR_BASE_AMOUNT_PARSER_H_ */
