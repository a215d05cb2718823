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
    PyObject *offload_error; /* oracle_offload.errors.OffloadError */
    PyObject *driver_error;  /* errors.driver_error, which makes the exception of a failed call */
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
    PyObject *engine; /* kept alive while it knows the memory */
};

extern PyType_Spec oo__host_buffer_spec;
extern PyType_Spec oo__engine_spec;

/* Integers as C types; -1 / 0 with an exception set on failure (check PyErr_Occurred). */
uintptr_t oo__as_address(PyObject *object);

#endif
