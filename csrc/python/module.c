/* module.c - `oracle_offload._core`: the module, its state, and the one place where a status
 * becomes an exception. */
#include "binding.h"

struct oo_module_state *oo__state(PyObject *module) { return PyModule_GetState(module); }

struct oo_module_state *oo__state_of(PyTypeObject *type) { return PyType_GetModuleState(type); }

int oo__integer(PyObject *object, const char *function, const struct oo_parameter *parameter,
                unsigned long long *value) {
    PyObject *number = PyNumber_Index(object);
    if (!number)
        return -1;
    int overflow;
    const long long small = PyLong_AsLongLongAndOverflow(number, &overflow);
    int fits = overflow == 0 && small >= parameter->least;
    *value = (unsigned long long)small;
    if (overflow > 0) {
        *value = PyLong_AsUnsignedLongLong(number);
        fits = !PyErr_Occurred();
        PyErr_Clear();
    }
    if (fits && (overflow > 0 || small >= 0))
        fits = *value <= parameter->most;
    if (!fits)
        PyErr_Format(PyExc_ValueError, "%s(): %s must be from %lld to %llu, not %S", function,
                     parameter->name, parameter->least, parameter->most, number);
    Py_DECREF(number);
    return fits ? 0 : -1;
}

int oo__integers(const char *function, PyObject *const *arguments, Py_ssize_t count,
                 const struct oo_parameter *parameters, Py_ssize_t expected,
                 unsigned long long *values) {
    if (count != expected) {
        PyErr_Format(PyExc_TypeError, "%s() takes %zd arguments, not %zd", function, expected,
                     count);
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++)
        if (oo__integer(arguments[i], function, &parameters[i], &values[i]) < 0)
            return -1;
    return 0;
}

/* Raise an exception that Python made: its class depends on whether torch is there. */
static void oo__raise_made(PyObject *error) {
    if (error)
        PyErr_SetObject((PyObject *)Py_TYPE(error), error);
    Py_XDECREF(error);
}

static void oo__raise_text(PyObject *type, PyObject *text) {
    if (text)
        PyErr_SetObject(type, text);
    Py_XDECREF(text);
}

PyObject *oo_raise(const struct oo_module_state *state, enum oo_status status) {
    const char *message = oo_error_message();
    const char *call, *name;
    int code;
    oo_error_driver(&call, &code, &name);
    switch (status) {
    case OO_E_MEMORY:
        PyErr_SetString(PyExc_MemoryError, message);
        break;
    case OO_E_NO_ROOM:
        oo__raise_made(PyObject_CallFunction(state->no_room_error, "s", message));
        break;
    case OO_E_ARGUMENT:
        PyErr_SetString(PyExc_ValueError, message);
        break;
    case OO_E_DRIVER:
    case OO_E_DEAD:
    case OO_LEAKED:
    case OO_E_LOCK_REFUSED:
    case OO_E_DRIVER_STUB:
        oo__raise_made(
            PyObject_CallFunction(state->driver_error, "ssis", message, call, code, name));
        break;
    case OO_E_FILE: /* whose name may be no text */
        oo__raise_text(state->offload_error, PyUnicode_DecodeFSDefault(message));
        break;
    case OO_OK:
    case OO_WOULD_BLOCK:
    case OO_E_STATE:
    case OO_E_TICKET:
    case OO_E_FORKED:
    case OO_E_CAPTURE:
    case OO_E_DRIVER_MISSING:
    case OO_E_DRIVER_OLD:
    case OO_E_NO_DEVICE:
    default:
        PyErr_SetString(state->offload_error, message);
        break;
    }
    return NULL;
}

void oo__report(PyTypeObject *type, enum oo_status status) {
    if (status != OO_LEAKED && status != OO_E_DRIVER)
        return;
    PyObject *kind, *value, *traceback;
    PyErr_Fetch(&kind, &value, &traceback);
    oo_raise(oo__state_of(type), status);
    PyErr_WriteUnraisable((PyObject *)type);
    PyErr_Restore(kind, value, traceback);
}

static PyObject *oo__live(PyObject *module, PyObject *unused) {
    (void)unused;
    const struct oo_module_state *state = oo__state(module);
    return Py_BuildValue("{s:n,s:n,s:n}", "engines", state->live_engines, "buffers",
                         state->live_buffers, "buffer_bytes", (Py_ssize_t)state->live_buffer_bytes);
}

static PyObject *oo__driver_probe(PyObject *module, PyObject *arguments, PyObject *keywords) {
    static char library_name[] = "library";
    static char *names[] = {library_name, NULL};
    const char *library = NULL;
    int version = 0, devices = 0;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "|z", names, &library))
        return NULL;
    enum oo_status status;
    Py_BEGIN_ALLOW_THREADS
    status = oo_driver_probe(library, &version, &devices);
    Py_END_ALLOW_THREADS
    return status == OO_OK ? Py_BuildValue("ii", version, devices)
                           : oo_raise(oo__state(module), status);
}

static PyMethodDef oo__functions[] = {
    {"live", oo__live, METH_NOARGS, "live()\n--\n\nObjects of this extension alive now."},
    {"driver_probe", (PyCFunction)(void (*)(void))oo__driver_probe, METH_VARARGS | METH_KEYWORDS,
     "driver_probe(library=None)\n--\n\n(driver version, number of devices)."},
    {NULL, NULL, 0, NULL},
};

static int oo__add_type(PyObject *module, PyType_Spec *spec, PyTypeObject **type) {
    *type = (PyTypeObject *)PyType_FromModuleAndSpec(module, spec, NULL);
    return *type ? PyModule_AddType(module, *type) : -1;
}

static int oo__execute(PyObject *module) {
    struct oo_module_state *state = oo__state(module);
    PyObject *errors = PyImport_ImportModule("oracle_offload.errors");
    if (!errors)
        return -1;
    state->offload_error = PyObject_GetAttrString(errors, "OffloadError");
    state->driver_error = PyObject_GetAttrString(errors, "driver_error");
    state->no_room_error = PyObject_GetAttrString(errors, "no_room_error");
    Py_DECREF(errors);
    if (!state->offload_error || !state->driver_error || !state->no_room_error ||
        oo__add_type(module, &oo__host_buffer_spec, &state->host_buffer_type) < 0 ||
        oo__add_type(module, &oo__engine_spec, &state->engine_type) < 0 ||
        oo__add_type(module, &oo__use_spec, &state->use_type) < 0 ||
        oo__add_type(module, &oo__taken_spec, &state->taken_type) < 0 ||
        PyModule_AddFunctions(module, oo__coded_functions) < 0 ||
        PyModule_AddIntConstant(module, "BF16", OO_CODEC_BF16) < 0 ||
        PyModule_AddIntConstant(module, "FP8", OO_CODEC_FP8) < 0 ||
        PyModule_AddIntConstant(module, "INT8", OO_CODEC_INT8) < 0 ||
        PyModule_AddStringConstant(module, "VERSION", oo_version()) < 0 ||
        PyModule_AddIntConstant(module, "FORWARD", OO_FORWARD) < 0 ||
        PyModule_AddIntConstant(module, "RECOMPUTE", OO_RECOMPUTE) < 0 ||
        PyModule_AddIntConstant(module, "BACKWARD", OO_BACKWARD) < 0 ||
        PyModule_AddIntConstant(module, "RECORDED", OO_RECORDED) < 0 ||
        PyModule_AddIntConstant(module, "ALIGNMENT", (long)OO_ALIGNMENT) < 0 ||
        PyModule_AddIntConstant(module, "STAGING_BYTES", (long)OO_STAGING_BYTES) < 0)
        return -1;
#if defined(__VERSION__)
    return PyModule_AddStringConstant(module, "BUILD", "C11, compiler " __VERSION__);
#else
    return PyModule_AddStringConstant(module, "BUILD", "C11");
#endif
}

static int oo__traverse(PyObject *module, visitproc visit, void *arg) {
    const struct oo_module_state *state = oo__state(module);
    Py_VISIT(state->host_buffer_type);
    Py_VISIT(state->engine_type);
    Py_VISIT(state->use_type);
    Py_VISIT(state->taken_type);
    Py_VISIT(state->offload_error);
    Py_VISIT(state->driver_error);
    Py_VISIT(state->no_room_error);
    return 0;
}

static int oo__clear(PyObject *module) {
    struct oo_module_state *state = oo__state(module);
    Py_CLEAR(state->host_buffer_type);
    Py_CLEAR(state->engine_type);
    Py_CLEAR(state->use_type);
    Py_CLEAR(state->taken_type);
    Py_CLEAR(state->offload_error);
    Py_CLEAR(state->driver_error);
    Py_CLEAR(state->no_room_error);
    return 0;
}

static PyModuleDef_Slot oo__slots[] = {
    {Py_mod_exec, (void *)oo__execute},
    {0, NULL},
};

struct PyModuleDef oo__module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "oracle_offload._core",
    .m_doc = "The engine; see csrc/include/oracle_offload.h.",
    .m_size = sizeof(struct oo_module_state),
    .m_methods = oo__functions,
    .m_slots = oo__slots,
    .m_traverse = oo__traverse,
    .m_clear = oo__clear,
};

PyMODINIT_FUNC PyInit__core(void);
PyMODINIT_FUNC PyInit__core(void) { return PyModuleDef_Init(&oo__module); }
