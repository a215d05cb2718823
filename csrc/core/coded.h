/* coded.h - a whole tensor as coded chunks, by several threads. Pure, but for its threads.
 *
 * The chunks come one after the other, each at a multiple of OO_ALIGNMENT; between them are zeros.
 * See struct oo_tensor. */
#ifndef OO_CODED_H
#define OO_CODED_H

#include "codec.h"

/* oo_coded_encode with chunks of `chunk` weights, a multiple of OO_CODEC_BLOCK: for tests. */
enum oo_status oo__coded_encode(enum oo_codec_kind kind, const void *weights, size_t count,
                                size_t chunk, unsigned threads, void *out, size_t *bytes);

#endif
