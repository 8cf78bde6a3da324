/* SPDX-License-Identifier: Apache-2.0 */
#include "client/preload/formats.h"

#include <stddef.h>

enum { LARGEST_CHANNEL_BITS = 32 };

/* CUarray_format of CUDA 13.0, in the header's order. `each`: bits of a channel; `all`: bits of an element, for any
 * number of channels. */
static const struct {
  unsigned char first, last, each, all, edge;
} formats[] = {
    {0x01, 0x01, 8, 0, 1},                                                  /* UNSIGNED_INT8 */
    {0x02, 0x02, 16, 0, 1},                                                 /* UNSIGNED_INT16 */
    {0x03, 0x03, 32, 0, 1},                                                 /* UNSIGNED_INT32 */
    {0x08, 0x08, 8, 0, 1},                                                  /* SIGNED_INT8 */
    {0x09, 0x09, 16, 0, 1},                                                 /* SIGNED_INT16 */
    {0x0a, 0x0a, 32, 0, 1},                                                 /* SIGNED_INT32 */
    {0x10, 0x10, 16, 0, 1},                                                 /* HALF */
    {0x20, 0x20, 32, 0, 1},                                                 /* FLOAT */
    {0x50, 0x50, 0, 32, 1},                                                 /* UNORM_INT_101010_2 */
    {0x91, 0x92, 0, 4, 4},                                                  /* BC1 */
    {0x93, 0x96, 0, 8, 4},                                                  /* BC2, BC3 */
    {0x97, 0x98, 0, 4, 4},                                                  /* BC4 */
    {0x99, 0x9e, 0, 8, 4},                                                  /* BC5, BC6H, BC7 */
    {0x9f, 0x9f, 0, 24, 1},                                                 /* P010 */
    {0xa1, 0xa1, 0, 24, 1},                                                 /* P016 */
    {0xa2, 0xa2, 0, 16, 1},                                                 /* NV16 */
    {0xa3, 0xa4, 0, 32, 1},                                                 /* P210, P216 */
    {0xa5, 0xa5, 0, 16, 1},                                                 /* YUY2 */
    {0xa6, 0xa7, 0, 32, 1},                                                 /* Y210, Y216 */
    {0xa8, 0xa9, 0, 32, 1},                                                 /* AYUV, Y410 */
    {0xb0, 0xb0, 0, 12, 1},                                                 /* NV12 */
    {0xb1, 0xb1, 0, 64, 1},                                                 /* Y416 */
    {0xb2, 0xb2, 0, 24, 1},                                                 /* Y444_PLANAR8 */
    {0xb3, 0xb3, 0, 48, 1},                                                 /* Y444_PLANAR10 */
    {0xb4, 0xb4, 0, 24, 1},                                                 /* YUV444_8bit_SemiPlanar */
    {0xb5, 0xb5, 0, 48, 1},                                                 /* YUV444_16bit_SemiPlanar */
    {0xc0, 0xc0, 0, 8, 1},                                                  /* UNORM_INT8X1 */
    {0xc1, 0xc1, 0, 16, 1}, {0xc2, 0xc2, 0, 32, 1}, {0xc3, 0xc3, 0, 16, 1}, /* UNORM_INT16X1 */
    {0xc4, 0xc4, 0, 32, 1}, {0xc5, 0xc5, 0, 64, 1}, {0xc6, 0xc6, 0, 8, 1},  /* SNORM_INT8X1 */
    {0xc7, 0xc7, 0, 16, 1}, {0xc8, 0xc8, 0, 32, 1}, {0xc9, 0xc9, 0, 16, 1}, /* SNORM_INT16X1 */
    {0xca, 0xca, 0, 32, 1}, {0xcb, 0xcb, 0, 64, 1},
};

struct element element_of(int format, unsigned int channels) {
  if (channels == 0) channels = 1;
  for (size_t i = 0; i < sizeof formats / sizeof *formats; i++) {
    if (format < formats[i].first || format > formats[i].last) continue;
    return (struct element){formats[i].all != 0 ? formats[i].all : formats[i].each * channels, formats[i].edge};
  }
  return (struct element){LARGEST_CHANNEL_BITS * channels, 1};
}
