/* SPDX-License-Identifier: Apache-2.0
 *
 * Names of sessions, made such as the daemon takes them. Plain C, since the preload library compiles it, too.
 */
#ifndef VRAMBROKER_ALLOCATOR_BASE_CLEAN_NAME_H_
#define VRAMBROKER_ALLOCATOR_BASE_CLEAN_NAME_H_

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { NAME_BYTES = 64, NAME_NOTE_BYTES = 192 }; /* with the NUL */

/* Letters, digits and . _ - / : @ */
__attribute__((visibility("hidden"))) int name_allows(char c);

/* `text` with _ for each other character, cut. 1: it is another one, and `note` says so to people. */
__attribute__((visibility("hidden"))) int name_clean(const char* text, size_t length, char name[NAME_BYTES],
                                                     char note[NAME_NOTE_BYTES]);

#ifdef __cplusplus
}
#endif

#endif /* VRAMBROKER_ALLOCATOR_BASE_CLEAN_NAME_H_ */
