/* SPDX-License-Identifier: Apache-2.0 */
#include "deploy/slurm/gres_share.h"

#include <ctype.h>
#include <errno.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

/* Finds the end of an entry: a comma outside of parentheses, as in "gpu:2(IDX:0,3)". */
static const char* end_of_entry(const char* at) {
  for (int depth = 0; *at != '\0' && (*at != ',' || depth > 0); ++at) depth += (*at == '(') - (*at == ')');
  return at;
}

/* Reads a number such as "8192" before `end`, followed by anything allowed after a number. */
static bool read_number(const char* at, const char* end, uint64_t* number) {
  if (at >= end || !isdigit((unsigned char)*at)) return false;
  char* after = NULL;
  errno = 0;
  const unsigned long long value = strtoull(at, &after, 10);
  *number = value;
  return errno == 0 && (after == end || *after == '(' || *after == ')');
}

/* Reads the part after the name: "(CNT:8192)" or ":TYPE(CNT:8192)" for resources that are only counted, ":2",
 * ":TYPE:2", ":2(IDX:0-1)" for other resources. */
static bool read_entry(const char* at, const char* end, uint64_t* number) {
  static const char kCounted[] = "(CNT:";
  const char* last_colon = NULL;
  for (; at < end; ++at) {
    if (strncmp(at, kCounted, sizeof kCounted - 1) == 0) return read_number(at + sizeof kCounted - 1, end, number);
    if (*at == '(') break;
    if (*at == ':') last_colon = at;
  }
  return last_colon != NULL && read_number(last_colon + 1, end, number);
}

bool vrambroker_gres_count(const char* details, const char* gres, uint64_t* count) {
  *count = 0;
  if (details == NULL) return true;
  const size_t length = strlen(gres);
  for (const char* at = details; *at != '\0';) {
    const char* const end = end_of_entry(at);
    if (strncmp(at, gres, length) == 0 && (at[length] == ':' || at[length] == '(')) {
      uint64_t number = 0;
      if (!read_entry(at + length, end, &number) || number > UINT64_MAX - *count) return false;
      *count += number;
    }
    at = *end == ',' ? end + 1 : end;
  }
  return true;
}
