/* fatbin.h - the kernels of csrc/kernels/ as compiled at build time, for cuModuleLoadData.
 *
 * setup.py writes the definitions. Built without nvcc the size is 0: callers must ask.
 */
#ifndef OO_FATBIN_H
#define OO_FATBIN_H

#include <stddef.h>

extern const unsigned char oo_kernels_fatbin[];
extern const size_t oo_kernels_fatbin_size;
/* The CUDA version of the nvcc that compiled them, as cuDriverGetVersion returns a driver's. */
extern const int oo_kernels_toolkit;

#endif
