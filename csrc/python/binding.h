/* binding.h - shared by the files of the extension module. Argument checks, GIL, lifetimes; no
 * policy. */
#ifndef OO_BINDING_H
#define OO_BINDING_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "oracle_offload.h"

struct oo_module_state {
    PyTypeObject *host_buffer_type;
    PyTypeObject *engine_type;
    PyTypeObject *use_type;
    PyTypeObject *taken_type;
    PyObject *offload_error; /* oracle_offload.errors.OffloadError */
    PyObject *driver_error;  /* errors.driver_error, which makes the exception of a failed call */
    PyObject *no_room_error; /* errors.no_room_error, likewise for an arena that is too small */
    Py_ssize_t live_engines, live_buffers;
    size_t live_buffer_bytes;
};

extern struct PyModuleDef oo__module;

struct oo_module_state *oo__state(PyObject *module);
struct oo_module_state *oo__state_of(PyTypeObject *type);

/* Raise the exception that belongs to a failed call, from the thread's last error; returns NULL. */
PyObject *oo_raise(const struct oo_module_state *state, enum oo_status status);

/* For a deallocation, which cannot raise: show a failure of the driver as Python shows exceptions
 * of finalizers. */
void oo__report(PyTypeObject *type, enum oo_status status);

struct oo_py_buffer {
    PyObject_HEAD struct oo_host *host;
    PyObject *engines; /* a list of those that know the memory: it keeps them alive */
};

extern PyType_Spec oo__host_buffer_spec;
extern PyType_Spec oo__engine_spec;
extern PyType_Spec oo__use_spec;
extern PyType_Spec oo__taken_spec;
extern PyMethodDef oo__coded_functions[]; /* of the module */

/* The ids of units as a tuple; None for none of them. */
PyObject *oo__units_tuple(const uint32_t *units, uint32_t count);
/* Copies of these units will not be stamped. */
void oo__distrust_units(PyObject *engine, const struct oo_fetched *fetched);
/* Begin and end a use of `engine`. 0, or -1 with an exception; the GIL is given up in a wait. */
int oo__acquire_use(PyObject *engine, const struct oo_request *request, struct oo_use *use);
int oo__release_use(PyObject *engine, uint64_t ticket, uintptr_t stream,
                    struct oo_fetched *fetched);
/* A use that has begun, of this type; `stamp_units` is called with what a call has fetched. */
PyObject *oo__use_begin(PyTypeObject *type, PyObject *engine, const struct oo_request *request,
                        PyObject *stamp_units);

/* An integer argument, and what it may be. */
struct oo_parameter {
    const char *name;
    long long least;
    unsigned long long most;
};
#define OO_ID(name)       {name, 0, UINT32_MAX - 1} /* UINT32_MAX is none, or all */
#define OO_NUMBER(name)   {name, 0, UINT64_MAX}
#define OO_ADDRESS(name)  {name, 0, UINTPTR_MAX} /* streams, too */
#define OO_BYTES(name)    {name, 0, PTRDIFF_MAX}
#define OO_COUNT_OF(rows) ((Py_ssize_t)(sizeof(rows) / sizeof *(rows)))

/* Read an argument of `function`; negative ones as two's complement. -1 with TypeError, or with
 * ValueError that has the value. May run Python code, unless `object` is an int. */
int oo__integer(PyObject *object, const char *function, const struct oo_parameter *parameter,
                unsigned long long *value);
/* Exactly `expected` of them. */
int oo__integers(const char *function, PyObject *const *arguments, Py_ssize_t count,
                 const struct oo_parameter *parameters, Py_ssize_t expected,
                 unsigned long long *values);

#endif
