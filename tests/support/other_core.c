/* SPDX-License-Identifier: Apache-2.0 */
/* Plays a libvrambroker-core.so of another version. */
#include <stddef.h>
#include <stdint.h>

const void* vrambroker_core_v1(uint32_t version);
const void* vrambroker_core_v1(uint32_t version) {
  (void)version;
  return NULL;
}

const char* vrambroker_core_release(void);
const char* vrambroker_core_release(void) {
  return "99.9.9";
}
