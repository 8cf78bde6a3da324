/* SPDX-License-Identifier: Apache-2.0 */
#ifndef VRAMBROKER_CLIENT_PRELOAD_HANDLES_H_
#define VRAMBROKER_CLIENT_PRELOAD_HANDLES_H_

/* An array, mipmapped or not, that is about to go: with it go the mappings of memory into it. */
void handles_forget_array(const void* array);
void handles_forget_all(void);

#endif /* VRAMBROKER_CLIENT_PRELOAD_HANDLES_H_ */
