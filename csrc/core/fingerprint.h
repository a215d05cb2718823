/* fingerprint.h - a hash that tells whether a master was rewritten. Pure. */
#ifndef OO_FINGERPRINT_H
#define OO_FINGERPRINT_H

#include <stddef.h>
#include <stdint.h>

/* Of all bytes (`whole`), or of a sample of them. */
uint64_t oo__fingerprint(const void *memory, size_t bytes, int whole);

#endif
