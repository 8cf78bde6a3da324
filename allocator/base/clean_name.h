/* SPDX-License-Identifier: Apache-2.0
 *
 * Cleans names of sessions for the daemon. Plain C, since the preload library compiles the file, too.
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

/* Copies `text`, with _ for each character not allowed, and cut. Returns 1 if the name differs: `note` says so. */
__attribute__((visibility("hidden"))) int name_clean(const char* text, size_t length, char name[NAME_BYTES],
                                                     char note[NAME_NOTE_BYTES]);

#ifdef __cplusplus
}
#endif

#endif /* VRAMBROKER_ALLOCATOR_BASE_CLEAN_NAME_H_ */
