/* handover.h - what the binding hands to the operators of csrc/torch: a use, and a gradient's way
 * to the host, without the calls of Python. They are compiled apart from it, over the headers of
 * one torch. */
#ifndef OO_HANDOVER_H
#define OO_HANDOVER_H

#include <Python.h>

#include "oracle_offload.h"

#ifdef __cplusplus
extern "C" {
#endif

#define OO_HANDOVER_NAME "oracle_offload._core.handover" /* of the capsule */
/* Differs where the operators were compiled for another binding. */
#define OO_HANDOVER_LAYOUT                                                                         \
    (sizeof(struct oo_handover) << 32 | sizeof(struct oo_request) << 16 | sizeof(struct oo_use))

/* With the GIL, which they give up where they would wait. `engine` is a `_core.Engine`. 0, or -1
 * with an exception. */
struct oo_handover {
    uint64_t layout;
    int (*acquire)(PyObject *engine, const struct oo_request *request, struct oo_use *use);
    int (*release)(PyObject *engine, uint64_t ticket, uintptr_t stream, struct oo_fetched *fetched);
    int (*download)(PyObject *engine, void *target, uintptr_t source, size_t nbytes,
                    uintptr_t stream);
};

extern const struct oo_handover oo__handover;

#ifdef __cplusplus
}
#endif

#endif
