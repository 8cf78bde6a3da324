/* SPDX-License-Identifier: Apache-2.0 */
#include "allocator/base/clean_name.h"

#include <stdio.h>
#include <string.h>

int name_allows(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
         (c != '\0' && strchr("._-/:@", c) != NULL);
}

/* Whether `c` is a byte of UTF-8 after the first byte of a character. */
static int continues(char c) {
  return ((unsigned char)c & 0xc0U) == 0x80U;
}

int name_clean(const char* text, size_t length, char name[NAME_BYTES], char note[NAME_NOTE_BYTES]) {
  size_t end = 0;
  for (size_t i = 0; i < length && end < NAME_BYTES - 1; i++) {
    if (i > 0 && continues(text[i]) && !name_allows(text[i - 1])) continue;
    name[end++] = name_allows(text[i]) ? text[i] : '_';
  }
  name[end] = '\0';
  if (end == length && memcmp(name, text, length) == 0) return 0;
  snprintf(note, NAME_NOTE_BYTES, "the session is called %s: at most %d letters, digits and . _ - / : @ are allowed",
           name, NAME_BYTES - 1);
  return 1;
}
