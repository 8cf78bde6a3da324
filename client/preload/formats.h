/* SPDX-License-Identifier: Apache-2.0
 *
 * Sizes of array elements, by the format in the descriptor.
 */
#ifndef VRAMBROKER_CLIENT_PRELOAD_FORMATS_H_
#define VRAMBROKER_CLIENT_PRELOAD_FORMATS_H_

struct element {
  unsigned int bits;
  unsigned int edge; /* elements are stored in squares of edge by edge */
};

/* Counts an unknown format with the largest channels. */
struct element element_of(int format, unsigned int channels);

#endif /* VRAMBROKER_CLIENT_PRELOAD_FORMATS_H_ */
