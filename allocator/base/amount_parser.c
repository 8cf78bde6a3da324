/* SPDX-License-Identifier: Apache-2.0 */
#include "allocator/base/amount_parser.h"

#include <stdio.h>
#include <string.h>

struct unit {
  const char* name;
  uint64_t factor;
};

static const struct unit sizes[] = {
    {"B", 1},
    {"K", UINT64_C(1) << 10},
    {"Ki", UINT64_C(1) << 10},
    {"KiB", UINT64_C(1) << 10},
    {"KB", UINT64_C(1000)},
    {"M", UINT64_C(1) << 20},
    {"Mi", UINT64_C(1) << 20},
    {"MiB", UINT64_C(1) << 20},
    {"MB", UINT64_C(1000000)},
    {"G", UINT64_C(1) << 30},
    {"Gi", UINT64_C(1) << 30},
    {"GiB", UINT64_C(1) << 30},
    {"GB", UINT64_C(1000000000)},
    {"T", UINT64_C(1) << 40},
    {"Ti", UINT64_C(1) << 40},
    {"TiB", UINT64_C(1) << 40},
    {"TB", UINT64_C(1000000000000)},
};
static const struct unit durations[] = {
    {"ns", 1},
    {"us", 1000},
    {"ms", 1000000},
    {"s", UINT64_C(1000000000)},
    {"sec", UINT64_C(1000000000)},
    {"m", UINT64_C(60000000000)},
    {"min", UINT64_C(60000000000)},
    {"h", UINT64_C(3600000000000)},
    {"d", UINT64_C(86400000000000)},
};
#define COUNT(array) (sizeof(array) / sizeof(array)[0])

/* Kind of an amount, for messages. */
struct kind {
  const char* what;
  const char* forms;
};

static const struct kind size_kind = {"a size", "write 512MiB, 8GiB (or 8G), 24GB (10^9) or plain bytes"};
static const struct kind share_kind = {"a share", "write 0.4 or 40%"};
static const struct kind limit_kind = {"a share or a size", "write 0.4, 40%, 512MiB, 8GiB (or 8G) or plain bytes"};
static const struct kind duration_kind = {"a duration", "write 500ms, 30s, 10m or 1h"};

static const char too_large[] = "it does not fit in 64 bits";
static const char too_much[] = "a share is at most 1.0, or 100%";

/* ---- Reading ---- */

struct span {
  const char* at;
  const char* end;
};

static int is_space(char c) {
  return c == ' ' || (c >= '\t' && c <= '\r');
}

static int is_digit(char c) {
  return c >= '0' && c <= '9';
}

static void skip_spaces(struct span* text) {
  while (text->at < text->end && is_space(*text->at)) text->at++;
}

static struct span trimmed(const char* text, size_t length) {
  struct span span = {text, text + length};
  skip_spaces(&span);
  while (span.at < span.end && is_space(span.end[-1])) span.end--;
  return span;
}

static size_t length_of(struct span span) {
  return (size_t)(span.end - span.at);
}

/* Digits, perhaps with a point between or before. */
struct number {
  struct span whole;
  struct span decimals;
  int has_point;
};

static struct span take_digits(struct span* text) {
  struct span digits = {text->at, text->at};
  while (text->at < text->end && is_digit(*text->at)) text->at++;
  digits.end = text->at;
  return digits;
}

/* Returns NULL, or a description of the fault. */
static const char* take_number(struct span* text, struct number* number) {
  if (text->at == text->end) return "it is empty";
  if (*text->at == '-') return "it is negative";
  memset(number, 0, sizeof *number);
  number->whole = take_digits(text);
  number->decimals = number->whole;
  number->decimals.at = number->decimals.end;
  if (text->at < text->end && *text->at == '.') {
    text->at++;
    number->has_point = 1;
    number->decimals = take_digits(text);
    if (length_of(number->decimals) == 0) return "digits must follow the point";
  } else if (length_of(number->whole) == 0) {
    return "it does not begin with a number";
  }
  return NULL;
}

static uint64_t digit(const char* at) {
  return (uint64_t)(*at - '0');
}

/* `number` times `factor`, rounded down. */
static const char* multiply(const struct number* number, uint64_t factor, uint64_t* product) {
  uint64_t whole = 0;
  for (const char* at = number->whole.at; at < number->whole.end; at++) {
    if (__builtin_mul_overflow(whole, UINT64_C(10), &whole)) return too_large;
    if (__builtin_add_overflow(whole, digit(at), &whole)) return too_large;
  }
  uint64_t part = 0; /* below `factor` */
  for (const char* at = number->decimals.end; at > number->decimals.at; at--) {
    part = (part + digit(at - 1) * factor) / 10;
  }
  if (__builtin_mul_overflow(whole, factor, &whole)) return too_large;
  if (__builtin_add_overflow(whole, part, product)) return too_large;
  return NULL;
}

static int has_only_zeros(struct span digits) {
  while (digits.at < digits.end && *digits.at == '0') digits.at++;
  return digits.at == digits.end;
}

static char lower(char c) {
  return c >= 'A' && c <= 'Z' ? (char)(c - 'A' + 'a') : c;
}

static int is_named(const char* unit, struct span name) {
  for (; name.at < name.end && *unit != '\0'; name.at++, unit++) {
    if (lower(*unit) != lower(*name.at)) return 0;
  }
  return name.at == name.end && *unit == '\0';
}

/* Returns 0 for an unknown name. */
static uint64_t find_factor(const struct unit* units, size_t count, struct span name) {
  for (size_t i = 0; i < count; i++) {
    if (is_named(units[i].name, name)) return units[i].factor;
  }
  return 0;
}

static const char* read_size(struct span text, uint64_t* bytes) {
  struct number number;
  const char* const wrong = take_number(&text, &number);
  if (wrong != NULL) return wrong;
  skip_spaces(&text);
  if (text.at == text.end) {
    if (number.has_point) return "it has a fraction, and no unit";
    return multiply(&number, 1, bytes);
  }
  if (*text.at == '%') return "it is a share, and a size is needed";
  const uint64_t factor = find_factor(sizes, COUNT(sizes), text);
  return factor == 0 ? "its unit is unknown" : multiply(&number, factor, bytes);
}

static int is_share(struct span text) {
  struct number number;
  if (take_number(&text, &number) != NULL) return 0;
  skip_spaces(&text);
  return (text.at == text.end && number.has_point) || (text.at < text.end && *text.at == '%');
}

static const char* read_share(struct span text, double* share) {
  struct number number;
  const char* const wrong = take_number(&text, &number);
  if (wrong != NULL) return wrong;
  skip_spaces(&text);
  const int is_percent = text.at < text.end && *text.at == '%';
  if (is_percent) text.at++;
  if (text.at < text.end) return "it is neither a fraction nor a percentage";
  while (number.whole.at < number.whole.end && *number.whole.at == '0') number.whole.at++;
  if (length_of(number.whole) > 3) return too_much;
  uint64_t value = 0;
  uint64_t scale = 1;
  for (const char* at = number.whole.at; at < number.whole.end; at++) value = value * 10 + digit(at);
  const uint64_t most = is_percent ? 100 : 1;
  if (value > most || (value == most && !has_only_zeros(number.decimals))) return too_much;
  /* Drops digits beyond the precision of a double; more would not fit, either. */
  const size_t most_digits = is_percent ? 16 : 18;
  if (length_of(number.decimals) > most_digits) number.decimals.end = number.decimals.at + most_digits;
  for (const char* at = number.decimals.at; at < number.decimals.end; at++) {
    value = value * 10 + digit(at);
    scale *= 10;
  }
  *share = (double)((long double)value / ((long double)scale * (long double)most));
  return NULL;
}

static const char* read_duration(struct span text, uint64_t* nanoseconds) {
  uint64_t sum = 0;
  int parts = 0;
  do {
    struct number number;
    const char* wrong = take_number(&text, &number);
    if (wrong != NULL) return wrong;
    skip_spaces(&text);
    struct span name = {text.at, text.at};
    while (name.end < text.end && !is_digit(*name.end) && *name.end != '.' && !is_space(*name.end)) name.end++;
    text.at = name.end;
    skip_spaces(&text);
    uint64_t factor = find_factor(durations, COUNT(durations), name);
    if (length_of(name) == 0) {
      const int is_zero = has_only_zeros(number.whole) && has_only_zeros(number.decimals);
      if (parts > 0 || !is_zero || text.at < text.end) return "its unit is missing";
      factor = 1;
    } else if (factor == 0) {
      return "its unit is unknown";
    }
    uint64_t part = 0;
    wrong = multiply(&number, factor, &part);
    if (wrong != NULL) return wrong;
    if (__builtin_add_overflow(sum, part, &sum)) return too_large;
    parts++;
  } while (text.at < text.end);
  *nanoseconds = sum;
  return NULL;
}

/* ---- Messages ---- */

/* Length of a text as repeated in messages, in whole characters of UTF-8. */
static int shown(const char* text, size_t length) {
  enum { MOST = 60 };
  if (length <= MOST) return (int)length;
  size_t end = MOST;
  while (end > 0 && ((unsigned char)text[end] & 0xc0U) == 0x80U) end--;
  return (int)end;
}

static int refuse(const char* text, size_t length, const struct kind* kind, const char* wrong,
                  char why[AMOUNT_WHY_BYTES]) {
  if (wrong == NULL) return 0;
  snprintf(why, AMOUNT_WHY_BYTES, "'%.*s' is not %s: %s; %s", shown(text, length), text, kind->what, wrong,
           kind->forms);
  return -1;
}

int amount_read_size(const char* text, size_t length, uint64_t* bytes, char why[AMOUNT_WHY_BYTES]) {
  return refuse(text, length, &size_kind, read_size(trimmed(text, length), bytes), why);
}

int amount_read_share(const char* text, size_t length, double* share, char why[AMOUNT_WHY_BYTES]) {
  return refuse(text, length, &share_kind, read_share(trimmed(text, length), share), why);
}

int amount_read_limit(const char* text, size_t length, struct amount_limit* limit, char why[AMOUNT_WHY_BYTES]) {
  const struct span span = trimmed(text, length);
  memset(limit, 0, sizeof *limit);
  limit->is_share = is_share(span);
  if (limit->is_share) return refuse(text, length, &limit_kind, read_share(span, &limit->share), why);
  const char* const wrong = read_size(span, &limit->bytes);
  if (wrong != NULL) return refuse(text, length, &limit_kind, wrong, why);
  /* Too few bytes for a segment. */
  if (is_digit(span.end[-1]) && limit->bytes > 0 && limit->bytes < UINT64_C(1) << 20) {
    const unsigned long long number = limit->bytes;
    char percent[16] = "";
    if (number <= 100) snprintf(percent, sizeof percent, " %llu%%,", number);
    snprintf(why, AMOUNT_WHY_BYTES,
             "'%.*s' is ambiguous: write %lluB for bytes, %lluGiB,%s or a fraction such as 0.5 (1.0 is the whole "
             "capacity)",
             shown(text, length), text, number, number, percent);
    return -1;
  }
  return 0;
}

int amount_read_duration(const char* text, size_t length, uint64_t* nanoseconds, char why[AMOUNT_WHY_BYTES]) {
  const struct span span = trimmed(text, length);
  const char* const wrong = read_duration(span, nanoseconds);
  if (wrong != NULL && span.at < span.end && length_of(span) <= 18) { /* a bare number: how to write it */
    struct span rest = span;
    (void)take_digits(&rest);
    if (rest.at == rest.end) {
      const int digits = (int)length_of(span);
      snprintf(why, AMOUNT_WHY_BYTES,
               "'%.*s' is not a duration: its unit is missing; write %.*ss for seconds, or %.*sms", digits, span.at,
               digits, span.at, digits, span.at);
      return -1;
    }
  }
  return refuse(text, length, &duration_kind, wrong, why);
}

int amount_read_milliseconds(const char* text, size_t length, uint64_t* milliseconds, char why[AMOUNT_WHY_BYTES]) {
  uint64_t nanoseconds = 0;
  if (amount_read_duration(text, length, &nanoseconds, why) != 0) return -1;
  *milliseconds = nanoseconds / 1000000 + (nanoseconds % 1000000 != 0);
  return 0;
}
