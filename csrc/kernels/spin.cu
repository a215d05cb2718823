// spin.cu - keep a stream busy for a given time, so that a test can make copies race a kernel.
#include "kernel.h"

OO_DEVICE unsigned long long now_ns() {
    unsigned long long ns;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
    return ns;
}

// Launch with one thread. Capped at ten seconds: a wrong argument must not hang the device.
OO_KERNEL spin(unsigned long long nanoseconds) {
    const unsigned long long longest = 10ull * 1000 * 1000 * 1000;
    const unsigned long long wanted = nanoseconds < longest ? nanoseconds : longest;
    const unsigned long long start = now_ns();
    while (now_ns() - start < wanted) {
        __nanosleep(500);
    }
}
