/* kernel.h - what the kernels are written in: C of which nvcc makes device code, and the tests
 * threads of their own that move in step (tests/c/warp.h). No name of C's library.
 */
#ifndef OO_KERNEL_H
#define OO_KERNEL_H

#ifdef __CUDACC__
#define OO_KERNEL extern "C" __global__ void
#define OO_DEVICE static __device__ __forceinline__
#endif

#endif
