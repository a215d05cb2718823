/* fingerprint.h - a hash that shows whether a master was rewritten. Pure. */
#ifndef OO_FINGERPRINT_H
#define OO_FINGERPRINT_H

#include <stddef.h>
#include <stdint.h>

/* How much is read: lines of 64 bytes, in so many places. */
enum oo_reading { OO_GLANCE = 4, OO_SAMPLE = 64, OO_WHOLE = -1 };

uint64_t oo__fingerprint(const void *memory, size_t bytes, enum oo_reading reading);

#endif
