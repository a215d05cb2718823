/* engine_type.c - Engine: oo_engine as a Python type.
 *
 * The GIL: acquire and release first try without blocking and keep it (dropping it for a
 * microsecond of work invites every other thread to take it for five milliseconds); only when the
 * engine says that it would block are they repeated with the GIL released. So they are where many
 * copies are queued and one more may wait for room in the driver's queue: the host is far ahead of
 * the device then, and has the time. */
#include "binding.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>

struct oo_py_engine {
    PyObject_HEAD struct oo_engine *engine; /* NULL once closed, and while it is being closed */
    unsigned calls;                         /* of other threads, which gave up the GIL for them */
};

static struct oo_engine *oo__engine_of(PyObject *object) {
    struct oo_engine *engine = ((struct oo_py_engine *)object)->engine;
    if (!engine)
        PyErr_SetString(oo__state_of(Py_TYPE(object))->offload_error, "this engine is closed");
    return engine;
}

static PyObject *oo__raise_for(PyObject *object, enum oo_status status) {
    return oo_raise(oo__state_of(Py_TYPE(object)), status);
}

static PyObject *oo__none_or_raise(PyObject *object, enum oo_status status) {
    if (status != OO_OK)
        return oo__raise_for(object, status);
    Py_RETURN_NONE;
}

static int oo__zero_or_raise(PyObject *object, enum oo_status status) {
    if (status != OO_OK)
        oo__raise_for(object, status);
    return status == OO_OK ? 0 : -1;
}

/* Run a call that may block, with the GIL released; until it returns the engine is not closed. */
#define OO_BLOCKING(status, call)                                                                  \
    do {                                                                                           \
        ((struct oo_py_engine *)object)->calls++;                                                  \
        PyThreadState *thread = PyEval_SaveThread();                                               \
        (status) = (call);                                                                         \
        PyEval_RestoreThread(thread);                                                              \
        ((struct oo_py_engine *)object)->calls--;                                                  \
    } while (0)

/* The engine, once the arguments are read: reading them may run Python code that closes it. */
static struct oo_engine *oo__engine_with(PyObject *object, const char *function,
                                         PyObject *const *arguments, Py_ssize_t count,
                                         const struct oo_parameter *parameters, Py_ssize_t expected,
                                         unsigned long long *values) {
    if (oo__integers(function, arguments, count, parameters, expected, values) < 0)
        return NULL;
    return oo__engine_of(object);
}

/* The same by name: the parameters of `f` are oo__f_takes. */
#define OO_ENGINE_WITH(f, count, values)                                                           \
    oo__engine_with(object, #f, arguments, count, oo__##f##_takes, OO_COUNT_OF(oo__##f##_takes),   \
                    values)

/* ---- life ---- */

static PyObject *oo__engine_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
    static char library_name[] = "library", device_name[] = "device";
    static char *names[] = {library_name, device_name, NULL};
    static const struct oo_parameter parameter = {"device", 0, INT_MAX};
    const char *library;
    PyObject *ordinal;
    unsigned long long device;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "zO", names, &library, &ordinal) ||
        oo__integer(ordinal, "Engine", &parameter, &device) < 0)
        return NULL;
    struct oo_module_state *state = oo__state_of(type);
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    struct oo_py_engine *self = (struct oo_py_engine *)allocate(type, 0);
    if (!self)
        return NULL;
    PyThreadState *thread = PyEval_SaveThread();
    enum oo_status status = oo_engine_create(library, (int)device, &self->engine);
    PyEval_RestoreThread(thread);
    if (status != OO_OK) {
        Py_DECREF(self);
        return oo_raise(state, status);
    }
    state->live_engines++;
    return (PyObject *)self;
}

static enum oo_status oo__engine_shut(PyObject *object) {
    struct oo_py_engine *self = (struct oo_py_engine *)object;
    struct oo_engine *engine = self->engine;
    if (!engine)
        return OO_OK;
    self->engine = NULL; /* to calls of other threads it is closed from now on */
    PyThreadState *thread = PyEval_SaveThread();
    enum oo_status status = oo_engine_destroy(engine);
    PyEval_RestoreThread(thread);
    if (status == OO_OK || status == OO_LEAKED)
        oo__state_of(Py_TYPE(object))->live_engines--;
    else
        self->engine = engine;
    return status;
}

static void oo__engine_dealloc(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    /* An engine with models attached is leaked rather than torn down under queued work. */
    oo__report(type, oo__engine_shut(object));
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(object);
    Py_DECREF(type);
}

static PyObject *oo__engine_close(PyObject *object, PyObject *unused) {
    (void)unused;
    if (((struct oo_py_engine *)object)->calls) {
        PyErr_SetString(oo__state_of(Py_TYPE(object))->offload_error,
                        "another thread is inside a call of this engine; close it afterwards");
        return NULL;
    }
    enum oo_status status = oo__engine_shut(object);
    return status == OO_LEAKED ? PyUnicode_FromString(oo_error_message())
                               : oo__none_or_raise(object, status);
}

/* ---- what is managed ---- */

static struct oo_py_buffer *oo__as_buffer(PyObject *object, PyObject *argument) {
    if (!PyObject_TypeCheck(argument, oo__state_of(Py_TYPE(object))->host_buffer_type)) {
        PyErr_SetString(PyExc_TypeError, "a HostBuffer is needed");
        return NULL;
    }
    return (struct oo_py_buffer *)argument;
}

/* The buffer no longer keeps the engine alive; an exception that is set stays. */
static void oo__let_go(const struct oo_py_buffer *buffer, PyObject *engine) {
    PyObject *kind, *value, *traceback;
    PyErr_Fetch(&kind, &value, &traceback);
    for (Py_ssize_t i = PyList_Size(buffer->engines) - 1; i >= 0; i--) {
        if (PyList_GetItem(buffer->engines, i) == engine) {
            (void)PyList_SetSlice(buffer->engines, i, i + 1, NULL);
            break;
        }
    }
    PyErr_Restore(kind, value, traceback);
}

static PyObject *oo__engine_lock(PyObject *object, PyObject *const *arguments, Py_ssize_t count) {
    if (count < 1 || count > 2)
        return PyErr_Format(PyExc_TypeError,
                            "lock() takes a HostBuffer and an optional size, not %zd arguments",
                            count);
    struct oo_py_buffer *buffer = oo__as_buffer(object, arguments[0]);
    static const struct oo_parameter parameter = OO_BYTES("nbytes");
    unsigned long long nbytes = OO_ALL_BYTES;
    if (!buffer || (count == 2 && oo__integer(arguments[1], "lock", &parameter, &nbytes) < 0))
        return NULL;
    /* First, since it may fail: the buffer keeps the engine alive. */
    if (PyList_Append(buffer->engines, object) < 0)
        return NULL;
    struct oo_engine *engine = oo__engine_of(object);
    if (!engine) {
        oo__let_go(buffer, object);
        return NULL;
    }
    enum oo_status status;
    OO_BLOCKING(status, oo_engine_lock(engine, buffer->host, (size_t)nbytes));
    if (status != OO_OK && status != OO_E_LOCK_REFUSED) {
        oo__raise_for(object, status);
        oo__let_go(buffer, object);
        return NULL;
    }
    if (status == OO_E_LOCK_REFUSED)
        return PyUnicode_FromString(oo_error_message());
    Py_RETURN_NONE;
}

static PyObject *oo__engine_lockable(PyObject *object, PyObject *argument) {
    struct oo_engine *engine = oo__engine_of(object);
    const struct oo_py_buffer *buffer = engine ? oo__as_buffer(object, argument) : NULL;
    size_t nbytes;
    if (!buffer)
        return NULL;
    enum oo_status status;
    OO_BLOCKING(status, oo_engine_lockable(engine, buffer->host, &nbytes));
    return status == OO_OK ? PyLong_FromSize_t(nbytes) : oo__raise_for(object, status);
}

static PyObject *oo__engine_reserve_rings(PyObject *object, PyObject *argument) {
    static const struct oo_parameter parameter = OO_BYTES("nbytes");
    unsigned long long nbytes;
    if (oo__integer(argument, "reserve_rings", &parameter, &nbytes) < 0)
        return NULL;
    struct oo_engine *engine = oo__engine_of(object);
    if (!engine)
        return NULL;
    enum oo_status status;
    OO_BLOCKING(status, oo_engine_reserve_rings(engine, (size_t)nbytes));
    if (status == OO_E_LOCK_REFUSED)
        return PyUnicode_FromString(oo_error_message());
    if (status != OO_OK)
        return oo__raise_for(object, status);
    Py_RETURN_NONE;
}

static PyObject *oo__engine_unlock(PyObject *object, PyObject *argument) {
    struct oo_engine *engine = oo__engine_of(object);
    struct oo_py_buffer *buffer = engine ? oo__as_buffer(object, argument) : NULL;
    if (!buffer)
        return NULL;
    enum oo_status status;
    OO_BLOCKING(status, oo_engine_unlock(engine, buffer->host));
    if (status != OO_OK)
        return oo__raise_for(object, status);
    oo__let_go(buffer, object);
    Py_RETURN_NONE;
}

static PyObject *oo__engine_add_model(PyObject *object, PyObject *unused) {
    (void)unused;
    struct oo_engine *engine = oo__engine_of(object);
    uint32_t model;
    if (!engine)
        return NULL;
    enum oo_status status;
    OO_BLOCKING(status, oo_model_add(engine, &model));
    return status == OO_OK ? PyLong_FromUnsignedLong(model) : oo__raise_for(object, status);
}

static const struct oo_parameter oo__remove_model_takes[] = {OO_ID("model")};

static PyObject *oo__engine_remove_model(PyObject *object, PyObject *argument) {
    PyObject *const arguments[] = {argument};
    unsigned long long model;
    struct oo_engine *engine = OO_ENGINE_WITH(remove_model, 1, &model);
    if (!engine)
        return NULL;
    enum oo_status status;
    OO_BLOCKING(status, oo_model_remove(engine, (uint32_t)model));
    return oo__none_or_raise(object, status);
}

static PyObject *oo__engine_add_lease(PyObject *object, PyObject *unused) {
    (void)unused;
    struct oo_engine *engine = oo__engine_of(object);
    uint32_t lease;
    if (!engine)
        return NULL;
    enum oo_status status;
    OO_BLOCKING(status, oo_lease_add(engine, &lease));
    return status == OO_OK ? PyLong_FromUnsignedLong(lease) : oo__raise_for(object, status);
}

static const struct oo_parameter oo__remove_lease_takes[] = {OO_ID("lease")};

static PyObject *oo__engine_remove_lease(PyObject *object, PyObject *argument) {
    PyObject *const arguments[] = {argument};
    unsigned long long lease;
    struct oo_engine *engine = OO_ENGINE_WITH(remove_lease, 1, &lease);
    if (!engine)
        return NULL;
    enum oo_status status;
    OO_BLOCKING(status, oo_lease_remove(engine, (uint32_t)lease));
    return oo__none_or_raise(object, status);
}

static const struct oo_parameter oo__add_segment_takes[] = {
    OO_ID("lease"), OO_ADDRESS("address"), OO_BYTES("nbytes"), OO_ADDRESS("stream")};

static PyObject *oo__engine_add_segment(PyObject *object, PyObject *const *arguments,
                                        Py_ssize_t count) {
    unsigned long long values[4];
    struct oo_engine *engine = OO_ENGINE_WITH(add_segment, count, values);
    if (!engine)
        return NULL;
    enum oo_status status;
    OO_BLOCKING(status, oo_segment_add(engine, (uint32_t)values[0], (uintptr_t)values[1],
                                       (size_t)values[2], (uintptr_t)values[3]));
    return oo__none_or_raise(object, status);
}

static const struct oo_parameter oo__add_staging_takes[] = {
    OO_ID("lease"), OO_ADDRESS("address"), OO_BYTES("nbytes"), OO_ADDRESS("stream")};

static PyObject *oo__engine_add_staging(PyObject *object, PyObject *const *arguments,
                                        Py_ssize_t count) {
    unsigned long long values[4];
    struct oo_engine *engine = OO_ENGINE_WITH(add_staging, count, values);
    if (!engine)
        return NULL;
    enum oo_status status;
    OO_BLOCKING(status, oo_staging_add(engine, (uint32_t)values[0], (uintptr_t)values[1],
                                       (size_t)values[2], (uintptr_t)values[3]));
    return oo__none_or_raise(object, status);
}

/* The rows of a list, as they are now; NULL with an exception. Whatever is read in several steps is
 * read from such a copy: any allocation may run a finalizer, and that may change the list. So it
 * may while PyList_AsTuple has its memory in hand. */
static PyObject *oo__rows(PyObject *list, const char *error) {
    PyObject *rows = NULL;
    Py_ssize_t count = 0;
    if (!PyList_Check(list)) {
        PyErr_SetString(PyExc_TypeError, error);
        return NULL;
    }
    do {
        Py_XDECREF(rows);
        count = PyList_Size(list);
        rows = PyTuple_New(count);
    } while (rows && PyList_Size(list) != count);
    for (Py_ssize_t i = 0; rows && i < count; i++) { /* which allocates nothing */
        PyObject *row = PyList_GetItem(list, i);
        Py_INCREF(row);
        PyTuple_SetItem(rows, i, row);
    }
    return rows;
}

/* The numbers of a tuple of two or three; -1 on error. They must be ints: reading them runs no
 * Python code. */
static int oo__numbers(PyObject *row, const char *what, const struct oo_parameter *parameters,
                       Py_ssize_t count, unsigned long long *values) {
    PyObject *parts[3] = {NULL, NULL, NULL};
    int are_integers = PyTuple_Check(row) && PyTuple_Size(row) == count;
    for (Py_ssize_t i = 0; are_integers && i < count; i++) {
        parts[i] = PyTuple_GetItem(row, i);
        are_integers = PyLong_Check(parts[i]);
    }
    if (!are_integers) {
        PyErr_Format(PyExc_TypeError, "%s is (%s, %s%s%s)", what, parameters[0].name,
                     parameters[1].name, count > 2 ? ", " : "",
                     count > 2 ? parameters[2].name : "");
        return -1;
    }
    return oo__integers(what, parts, count, parameters, count, values);
}

static int oo__pair(PyObject *pair, const char *what, const struct oo_parameter *parameters,
                    unsigned long long *values) {
    return oo__numbers(pair, what, parameters, 2, values);
}

static PyObject *oo__engine_keep_in(PyObject *object, PyObject *arguments) {
    static const struct oo_parameter takes[] = {OO_ADDRESS("address"), OO_BYTES("nbytes"),
                                                OO_BYTES("place")};
    PyObject *argument, *list;
    if (!PyArg_ParseTuple(arguments, "OO", &argument, &list))
        return NULL;
    const struct oo_py_buffer *room = oo__as_buffer(object, argument);
    PyObject *rows = room ? oo__rows(list, "what is kept is a list") : NULL;
    if (!rows)
        return NULL;
    const Py_ssize_t n_rows = PyTuple_Size(rows);
    PyObject *result = NULL;
    struct oo_keeping *kept = PyMem_Malloc(((size_t)n_rows + 1) * sizeof *kept);
    if (!kept) {
        PyErr_NoMemory();
        goto done;
    }
    for (Py_ssize_t i = 0; i < n_rows; i++) {
        unsigned long long v[3];
        if (oo__numbers(PyTuple_GetItem(rows, i), "what is kept", takes, 3, v) < 0)
            goto done;
        kept[i] = (struct oo_keeping){(const void *)(uintptr_t)v[0], (size_t)v[1], (size_t)v[2]};
    }
    struct oo_engine *engine = oo__engine_of(object);
    if (!engine)
        goto done;
    enum oo_status status;
    OO_BLOCKING(status, oo_engine_keep_in(engine, room->host, kept, (size_t)n_rows));
    result = oo__none_or_raise(object, status);
done:
    Py_DECREF(rows);
    PyMem_Free(kept);
    return result;
}

static const struct oo_parameter oo__tensor_takes[] = {OO_ADDRESS("address"), OO_BYTES("nbytes")};
static const struct oo_parameter oo__coded_takes[] = {OO_BYTES("coded_nbytes"),
                                                      {"coded_kind", 0, OO_CODEC_INT8}};

/* (address, nbytes), or of a coded tensor (address, nbytes, coded_nbytes, coded_kind); -1 on error.
 */
static int oo__tensor(PyObject *row, struct oo_tensor *tensor) {
    unsigned long long values[4] = {0, 0, 0, 0};
    int result;
    if (PyTuple_Check(row) && PyTuple_Size(row) == 4) {
        PyObject *plain = PyTuple_GetSlice(row, 0, 2), *coded = PyTuple_GetSlice(row, 2, 4);
        result = plain && coded ? oo__pair(plain, "a tensor", oo__tensor_takes, values) : -1;
        if (result == 0)
            result = oo__pair(coded, "the end of a coded tensor", oo__coded_takes, values + 2);
        Py_XDECREF(plain);
        Py_XDECREF(coded);
    } else {
        result = oo__pair(row, "a tensor", oo__tensor_takes, values);
    }
    *tensor = (struct oo_tensor){(const void *)(uintptr_t)values[0], (size_t)values[1],
                                 (size_t)values[2], (enum oo_codec_kind)values[3]};
    return result;
}

/* Rows of them appended to `tensors` from `*n` on; -1 on error. */
static int oo__append_tensors(PyObject *rows, struct oo_tensor *tensors, size_t *n) {
    for (Py_ssize_t i = 0; i < PyTuple_Size(rows); i++)
        if (oo__tensor(PyTuple_GetItem(rows, i), &tensors[(*n)++]) < 0)
            return -1;
    return 0;
}

/* The rows of each list of a list, as they are now, and how many there are of all; NULL with an
 * exception. */
static PyObject *oo__rows_of_members(PyObject *lists, size_t *n_tensors) {
    PyObject *members = oo__rows(lists, "members are a list");
    const Py_ssize_t count = members ? PyTuple_Size(members) : 0;
    PyObject *rows = members ? PyTuple_New(count) : NULL;
    *n_tensors = 0;
    for (Py_ssize_t i = 0; rows && i < count; i++) {
        PyObject *row =
            oo__rows(PyTuple_GetItem(members, i), "each member is a list of (address, nbytes)");
        if (row)
            *n_tensors += (size_t)PyTuple_Size(row);
        if (!row || PyTuple_SetItem(rows, i, row) < 0)
            Py_CLEAR(rows);
    }
    Py_XDECREF(members);
    return rows;
}

static PyObject *oo__offsets_list(const size_t *offsets, size_t count) {
    PyObject *list = PyList_New((Py_ssize_t)count);
    for (size_t i = 0; list && i < count; i++) {
        PyObject *offset = PyLong_FromSize_t(offsets[i]);
        if (!offset || PyList_SetItem(list, (Py_ssize_t)i, offset) < 0)
            Py_CLEAR(list);
    }
    return list;
}

static PyObject *oo__engine_add_unit(PyObject *object, PyObject *arguments) {
    static const struct oo_parameter parameter = OO_ID("model");
    unsigned long long model;
    PyObject *id, *lists, *result = NULL, *members = NULL;
    int trainable;
    if (!PyArg_ParseTuple(arguments, "OO!p", &id, &PyList_Type, &lists, &trainable) ||
        oo__integer(id, "add_unit", &parameter, &model) < 0)
        return NULL;
    size_t n_tensors;
    PyObject *rows = oo__rows_of_members(lists, &n_tensors);
    if (!rows)
        return NULL;
    const size_t n_members = (size_t)PyTuple_Size(rows);
    /* One more than needed: malloc(0) may be NULL. */
    struct oo_tensor *tensors = PyMem_Malloc((n_tensors + 1) * sizeof *tensors);
    size_t *offsets = PyMem_Malloc((n_tensors + 1) * sizeof *offsets);
    uint32_t *counts = PyMem_Malloc((n_members + 1) * sizeof *counts);
    uint32_t *ids = PyMem_Malloc((n_members + 1) * sizeof *ids);
    uint32_t unit = 0;
    if (!tensors || !offsets || !counts || !ids) {
        PyErr_NoMemory();
        goto done;
    }
    size_t filled = 0;
    for (size_t i = 0; i < n_members; i++) {
        const size_t before = filled;
        if (oo__append_tensors(PyTuple_GetItem(rows, (Py_ssize_t)i), tensors, &filled) < 0)
            goto done;
        counts[i] = (uint32_t)(filled - before);
    }
    struct oo_engine *engine = oo__engine_of(object);
    if (!engine)
        goto done;
    enum oo_status status;
    OO_BLOCKING(status, oo_unit_add(engine, (uint32_t)model, tensors, counts, (uint32_t)n_members,
                                    trainable, &unit, ids, offsets));
    if (status != OO_OK) {
        oo__raise_for(object, status);
        goto done;
    }
    members = PyList_New(0);
    const size_t *next = offsets;
    for (size_t i = 0; members && i < n_members; i++) {
        PyObject *list = oo__offsets_list(next, counts[i]);
        PyObject *row = list ? Py_BuildValue("(IN)", (unsigned int)ids[i], list) : NULL;
        if (!row || PyList_Append(members, row) < 0)
            Py_CLEAR(members);
        Py_XDECREF(row);
        next += counts[i];
    }
    if (members)
        result = Py_BuildValue("(IN)", (unsigned int)unit, members);
done:
    Py_DECREF(rows);
    PyMem_Free(tensors);
    PyMem_Free(offsets);
    PyMem_Free(counts);
    PyMem_Free(ids);
    return result;
}

static const struct oo_parameter oo__set_trainable_takes[] = {OO_ID("unit"), {"trainable", 0, 1}};

static PyObject *oo__engine_set_trainable(PyObject *object, PyObject *const *arguments,
                                          Py_ssize_t count) {
    unsigned long long v[2];
    struct oo_engine *engine = OO_ENGINE_WITH(set_trainable, count, v);
    if (!engine)
        return NULL;
    enum oo_status status;
    OO_BLOCKING(status, oo_unit_set_trainable(engine, (uint32_t)v[0], v[1] != 0));
    return oo__none_or_raise(object, status);
}

static PyObject *oo__engine_move_member(PyObject *object, PyObject *arguments) {
    static const struct oo_parameter parameter = OO_ID("member");
    unsigned long long member;
    PyObject *id, *list, *result = NULL;
    if (!PyArg_ParseTuple(arguments, "OO!", &id, &PyList_Type, &list) ||
        oo__integer(id, "move_member", &parameter, &member) < 0)
        return NULL;
    PyObject *rows = oo__rows(list, "tensors are a list");
    if (!rows)
        return NULL;
    size_t count = (size_t)PyTuple_Size(rows), filled = 0;
    struct oo_tensor *tensors = PyMem_Malloc((count + 1) * sizeof *tensors);
    size_t *offsets = PyMem_Malloc((count + 1) * sizeof *offsets);
    uint32_t unit = 0;
    if (!tensors || !offsets) {
        PyErr_NoMemory();
        goto done;
    }
    if (oo__append_tensors(rows, tensors, &filled) < 0)
        goto done;
    struct oo_engine *engine = oo__engine_of(object);
    if (!engine)
        goto done;
    enum oo_status status;
    OO_BLOCKING(status,
                oo_member_move(engine, (uint32_t)member, tensors, (uint32_t)count, &unit, offsets));
    if (status != OO_OK) {
        oo__raise_for(object, status);
        goto done;
    }
    PyObject *starts = oo__offsets_list(offsets, count);
    if (starts)
        result = Py_BuildValue("(IN)", (unsigned int)unit, starts);
done:
    Py_DECREF(rows);
    PyMem_Free(tensors);
    PyMem_Free(offsets);
    return result;
}

static const struct oo_parameter oo__remove_member_takes[] = {OO_ID("member")};

static PyObject *oo__engine_remove_member(PyObject *object, PyObject *argument) {
    unsigned long long member;
    PyObject *const *const arguments = &argument;
    struct oo_engine *engine = OO_ENGINE_WITH(remove_member, 1, &member);
    if (!engine)
        return NULL;
    enum oo_status status;
    OO_BLOCKING(status, oo_member_remove(engine, (uint32_t)member));
    return oo__none_or_raise(object, status);
}

/* ---- use ---- */

PyObject *oo__units_tuple(const uint32_t *units, uint32_t count) {
    if (count == 0)
        Py_RETURN_NONE;
    PyObject *tuple = PyTuple_New((Py_ssize_t)count);
    for (uint32_t i = 0; tuple && i < count; i++) {
        PyObject *unit = PyLong_FromUnsignedLong(units[i]);
        if (!unit || PyTuple_SetItem(tuple, (Py_ssize_t)i, unit) < 0)
            Py_CLEAR(tuple);
    }
    return tuple;
}

int oo__acquire_use(PyObject *object, const struct oo_request *request, struct oo_use *use) {
    struct oo_engine *engine = oo__engine_of(object);
    if (!engine)
        return -1;
    enum oo_status status = oo_engine_acquire(engine, request, OO_NONBLOCKING | OO_LAUNCH, use);
    if (status == OO_WOULD_BLOCK)
        OO_BLOCKING(status, oo_engine_acquire(engine, request, OO_LAUNCH, use));
    return oo__zero_or_raise(object, status);
}

int oo__release_use(PyObject *object, uint64_t ticket, uintptr_t stream,
                    struct oo_fetched *fetched) {
    struct oo_engine *engine = oo__engine_of(object);
    if (!engine)
        return -1;
    enum oo_status status = oo_engine_release(engine, ticket, stream, OO_NONBLOCKING, fetched);
    if (status == OO_WOULD_BLOCK)
        OO_BLOCKING(status, oo_engine_release(engine, ticket, stream, 0, fetched));
    else if (status == OO_OK && fetched->more && fetched->count == 0) {
        /* Else the caller stamps what was copied before other threads run, and the rest is copied
         * by the next release. */
        OO_BLOCKING(status, oo_engine_prefetch(engine, fetched));
        if (status != OO_E_DEAD) /* a copy ahead that fails is given up */
            status = OO_OK;
    }
    return oo__zero_or_raise(object, status);
}

void oo__distrust_units(PyObject *object, const struct oo_fetched *fetched) {
    struct oo_engine *engine = ((struct oo_py_engine *)object)->engine;
    if (!engine || !fetched->count)
        return;
    enum oo_status status = oo_engine_distrust(engine, fetched, OO_NONBLOCKING);
    if (status == OO_WOULD_BLOCK)
        OO_BLOCKING(status, oo_engine_distrust(engine, fetched, 0));
    (void)status; /* a dead one copies nothing any more */
}

static const struct oo_parameter oo__acquire_takes[] = {OO_ID("member"),
                                                        OO_ADDRESS("stream"),
                                                        OO_NUMBER("stamp"),
                                                        {"kind", OO_FORWARD, OO_RECORDED},
                                                        {"task", -1, INT64_MAX}};

/* What acquire() and use() are asked for; the first six of `expected` arguments. */
static int oo__request_of(PyObject *object, const char *function, PyObject *const *arguments,
                          Py_ssize_t count, Py_ssize_t expected, struct oo_request *request) {
    unsigned long long v[5];
    if (count != expected) {
        PyErr_Format(PyExc_TypeError, "%s() takes %zd arguments, not %zd", function, expected,
                     count);
        return -1;
    }
    const double seconds = PyFloat_AsDouble(arguments[5]);
    if (PyErr_Occurred() || oo__integers(function, arguments, 5, oo__acquire_takes, 5, v) < 0)
        return -1;
    *request = (struct oo_request){.member = (uint32_t)v[0],
                                   .stream = (uintptr_t)v[1],
                                   .stamp = v[2],
                                   .kind = (enum oo_kind)v[3],
                                   .task = (int64_t)v[4],
                                   .seconds = seconds};
    return oo__engine_of(object) ? 0 : -1;
}

static PyObject *oo__engine_acquire(PyObject *object, PyObject *const *arguments,
                                    Py_ssize_t count) {
    struct oo_request request;
    struct oo_use use;
    if (oo__request_of(object, "acquire", arguments, count, 6, &request) < 0 ||
        oo__acquire_use(object, &request, &use) < 0)
        return NULL;
    PyObject *fetched = oo__units_tuple(use.fetched.units, use.fetched.count);
    return fetched ? Py_BuildValue("(KKN)", (unsigned long long)use.ticket,
                                   (unsigned long long)use.address, fetched)
                   : NULL;
}

static PyObject *oo__engine_use(PyObject *object, PyObject *const *arguments, Py_ssize_t count) {
    struct oo_request request;
    if (oo__request_of(object, "use", arguments, count, 7, &request) < 0)
        return NULL;
    return oo__use_begin(oo__state_of(Py_TYPE(object))->use_type, object, &request, arguments[6]);
}

/* A DLPack tensor (its ABI of before version 1, which every torch takes), up to what we set. */
struct oo_dl_tensor {
    void *data;
    int32_t device_type, device_id;
    int32_t n_dimensions;
    uint8_t type_code, type_bits;
    uint16_t type_lanes;
    int64_t *shape, *strides;
    uint64_t byte_offset;
};

struct oo_dl_managed {
    struct oo_dl_tensor tensor;
    void *context;
    void (*deleter)(struct oo_dl_managed *self);
};

/* Memory of a slot, or of masters, as a tensor of bytes, and the use that ends with it. */
struct oo_kept {
    struct oo_dl_managed managed; /* first: the deleter gets a pointer to it */
    int64_t nbytes;
    struct oo_engine *engine;
    uint64_t ticket; /* of a slot's use */
    uint32_t member; /* whose masters are mapped */
    uintptr_t stream;
};

/* Called when the last alias of the tensor is gone: on any thread, with the GIL or without it. So
 * nothing of Python may be touched. Waiting for the engine's mutex with the GIL is safe, because no
 * thread asks for the GIL while it holds the mutex. A failure is the driver's, and surfaces at the
 * next call. */
static void oo__kept_delete(struct oo_dl_managed *managed) {
    struct oo_kept *kept = (struct oo_kept *)managed;
    (void)oo_engine_end(kept->engine, kept->ticket, kept->stream);
    free(kept);
}

static void oo__mapped_delete(struct oo_dl_managed *managed) {
    struct oo_kept *kept = (struct oo_kept *)managed;
    (void)oo_engine_unmap(kept->engine, kept->member, kept->stream);
    free(kept);
}

static const char oo__capsule_name[] = "dltensor"; /* a consumer renames it */

static void oo__capsule_delete(PyObject *capsule) {
    if (PyCapsule_IsValid(capsule, oo__capsule_name)) {
        struct oo_dl_managed *managed = PyCapsule_GetPointer(capsule, oo__capsule_name);
        managed->deleter(managed);
    }
}

/* A capsule of `nbytes` from `address`, on a device by DLPack's numbers. */
static PyObject *oo__capsule_of(struct oo_kept *kept, uintptr_t address, unsigned long long nbytes,
                                unsigned long long device_type, unsigned long long device_index) {
    kept->nbytes = (int64_t)nbytes;
    kept->managed.tensor = (struct oo_dl_tensor){
        .data = (void *)address,
        .device_type = (int32_t)device_type,
        .device_id = (int32_t)device_index,
        .n_dimensions = 1,
        .type_code = 1, /* unsigned */
        .type_bits = 8,
        .type_lanes = 1,
        .shape = &kept->nbytes,
    };
    PyObject *capsule = PyCapsule_New(&kept->managed, oo__capsule_name, oo__capsule_delete);
    if (!capsule)
        kept->managed.deleter(&kept->managed);
    return capsule;
}

static const struct oo_parameter oo__keep_takes[] = {
    OO_ID("member"),    OO_ADDRESS("stream"),        OO_BYTES("offset"),
    OO_BYTES("nbytes"), {"device_type", 1, INT_MAX}, {"device_index", 0, INT_MAX}};

static PyObject *oo__engine_keep(PyObject *object, PyObject *const *arguments, Py_ssize_t count) {
    unsigned long long v[6];
    struct oo_engine *engine = OO_ENGINE_WITH(keep, count, v);
    if (!engine)
        return NULL;
    struct oo_kept *kept = calloc(1, sizeof *kept); /* freed without the GIL */
    if (!kept)
        return PyErr_NoMemory();
    struct oo_use use;
    enum oo_status status = oo_engine_keep(engine, (uint32_t)v[0], OO_NONBLOCKING, &use);
    if (status == OO_WOULD_BLOCK)
        OO_BLOCKING(status, oo_engine_keep(engine, (uint32_t)v[0], 0, &use));
    if (status != OO_OK) {
        free(kept);
        return oo__raise_for(object, status);
    }
    kept->engine = engine;
    kept->ticket = use.ticket;
    kept->stream = (uintptr_t)v[1];
    kept->managed.deleter = oo__kept_delete;
    return oo__capsule_of(kept, use.address + (uintptr_t)v[2], v[3], v[4], v[5]);
}

static const struct oo_parameter oo__map_takes[] = {OO_ID("member"),
                                                    OO_ADDRESS("stream"),
                                                    OO_BYTES("nbytes"),
                                                    {"device_type", 1, INT_MAX},
                                                    {"device_index", 0, INT_MAX}};

static PyObject *oo__engine_map(PyObject *object, PyObject *const *arguments, Py_ssize_t count) {
    unsigned long long v[5];
    if (count != 6)
        return PyErr_Format(PyExc_TypeError, "map() takes 6 arguments, not %zd", count);
    const double seconds = PyFloat_AsDouble(arguments[5]);
    if (PyErr_Occurred())
        return NULL;
    struct oo_engine *engine = OO_ENGINE_WITH(map, 5, v);
    if (!engine)
        return NULL;
    struct oo_kept *kept = calloc(1, sizeof *kept); /* freed without the GIL */
    if (!kept)
        return PyErr_NoMemory();
    const struct oo_request request = {
        .member = (uint32_t)v[0], .stream = (uintptr_t)v[1], .seconds = seconds};
    uintptr_t address;
    enum oo_status status = oo_engine_map(engine, &request, OO_NONBLOCKING, &address);
    if (status == OO_WOULD_BLOCK)
        OO_BLOCKING(status, oo_engine_map(engine, &request, 0, &address));
    if (status != OO_OK || !address) {
        free(kept);
        return oo__none_or_raise(object, status);
    }
    kept->engine = engine;
    kept->member = request.member;
    kept->stream = request.stream;
    kept->managed.deleter = oo__mapped_delete;
    return oo__capsule_of(kept, address, v[2], v[3], v[4]);
}

static const struct oo_parameter oo__release_takes[] = {OO_NUMBER("ticket"), OO_ADDRESS("stream")};

static PyObject *oo__engine_release(PyObject *object, PyObject *const *arguments,
                                    Py_ssize_t count) {
    unsigned long long v[2];
    struct oo_fetched fetched;
    if (!OO_ENGINE_WITH(release, count, v) ||
        oo__release_use(object, v[0], (uintptr_t)v[1], &fetched) < 0)
        return NULL;
    return oo__units_tuple(fetched.units, fetched.count);
}

static const struct oo_parameter oo__stamp_takes[] = {OO_ID("member"), OO_NUMBER("stamp")};

/* The stamps of a list of (member, stamp), to be freed; NULL with an error set. */
static struct oo_stamp *oo__stamps_of(PyObject *list, const char *what, uint32_t *n) {
    PyObject *rows = oo__rows(list, what);
    if (!rows)
        return NULL;
    const Py_ssize_t count = PyTuple_Size(rows);
    struct oo_stamp *stamps = PyMem_Malloc(((size_t)count + 1) * sizeof *stamps);
    if (!stamps)
        PyErr_NoMemory();
    for (Py_ssize_t i = 0; stamps && i < count; i++) {
        unsigned long long v[2];
        if (oo__pair(PyTuple_GetItem(rows, i), "a stamp", oo__stamp_takes, v) < 0) {
            PyMem_Free(stamps);
            stamps = NULL;
        } else {
            stamps[i] = (struct oo_stamp){(uint32_t)v[0], v[1]};
        }
    }
    Py_DECREF(rows);
    *n = (uint32_t)count;
    return stamps;
}

static PyObject *oo__engine_stamp(PyObject *object, PyObject *list) {
    uint32_t count;
    struct oo_stamp *stamps =
        oo__stamps_of(list, "stamp() takes a list of (member, stamp)", &count);
    if (!stamps)
        return NULL;
    PyObject *result = NULL;
    struct oo_engine *engine = oo__engine_of(object);
    if (engine) {
        enum oo_status status = oo_engine_stamp(engine, stamps, count, OO_NONBLOCKING);
        if (status == OO_WOULD_BLOCK)
            OO_BLOCKING(status, oo_engine_stamp(engine, stamps, count, 0));
        result = oo__none_or_raise(object, status);
    }
    PyMem_Free(stamps);
    return result;
}

/* ---- masters that the device rewrites ---- */

static const struct oo_parameter oo__rewrite_takes[] = {OO_ID("unit"), OO_ADDRESS("stream")};

static PyObject *oo__engine_rewrite(PyObject *object, PyObject *const *arguments,
                                    Py_ssize_t count) {
    unsigned long long v[2];
    uint32_t n_stamps;
    if (count != 3)
        return PyErr_Format(PyExc_TypeError, "rewrite() takes 3 arguments, not %zd", count);
    if (oo__integers("rewrite", arguments, 2, oo__rewrite_takes, 2, v) < 0)
        return NULL;
    struct oo_stamp *stamps =
        oo__stamps_of(arguments[2], "rewrite() takes a list of (member, stamp)", &n_stamps);
    if (!stamps)
        return NULL;
    PyObject *result = NULL;
    struct oo_engine *engine = oo__engine_of(object);
    if (engine) {
        uintptr_t address;
        enum oo_status status;
        OO_BLOCKING(status, oo_unit_rewrite(engine, (uint32_t)v[0], stamps, n_stamps,
                                            (uintptr_t)v[1], &address));
        result =
            status == OO_OK ? PyLong_FromUnsignedLongLong(address) : oo__raise_for(object, status);
    }
    PyMem_Free(stamps);
    return result;
}

static PyObject *oo__engine_rewritten(PyObject *object, PyObject *const *arguments,
                                      Py_ssize_t count) {
    unsigned long long v[2];
    uint32_t n_stamps;
    if (count != 3)
        return PyErr_Format(PyExc_TypeError, "rewritten() takes 3 arguments, not %zd", count);
    if (oo__integers("rewritten", arguments, 2, oo__rewrite_takes, 2, v) < 0)
        return NULL;
    struct oo_stamp *stamps =
        oo__stamps_of(arguments[2], "rewritten() takes a list of (member, stamp)", &n_stamps);
    if (!stamps)
        return NULL;
    PyObject *result = NULL;
    struct oo_engine *engine = oo__engine_of(object);
    if (engine) {
        enum oo_status status;
        OO_BLOCKING(status,
                    oo_unit_rewritten(engine, (uint32_t)v[0], stamps, n_stamps, (uintptr_t)v[1]));
        result = oo__none_or_raise(object, status);
    }
    PyMem_Free(stamps);
    return result;
}

static PyObject *oo__engine_written(PyObject *object, PyObject *const *arguments,
                                    Py_ssize_t count) {
    unsigned long long v[2];
    struct oo_engine *engine = oo__engine_with(
        object, "written", arguments, count, oo__rewrite_takes, OO_COUNT_OF(oo__rewrite_takes), v);
    if (!engine)
        return NULL;
    enum oo_status status;
    OO_BLOCKING(status, oo_unit_written(engine, (uint32_t)v[0], (uintptr_t)v[1]));
    return oo__none_or_raise(object, status);
}

static const struct oo_parameter oo__download_takes[] = {OO_ADDRESS("target"), OO_ADDRESS("source"),
                                                         OO_BYTES("nbytes"), OO_ADDRESS("stream")};

static PyObject *oo__engine_download(PyObject *object, PyObject *const *arguments,
                                     Py_ssize_t count) {
    unsigned long long v[4];
    struct oo_engine *engine = OO_ENGINE_WITH(download, count, v);
    if (!engine)
        return NULL;
    enum oo_status status;
    OO_BLOCKING(status, oo_engine_download(engine, (void *)(uintptr_t)v[0], (uintptr_t)v[1],
                                           (size_t)v[2], (uintptr_t)v[3]));
    return oo__none_or_raise(object, status);
}

/* ---- trips ---- */

static PyObject *oo__ticket_or_raise(PyObject *object, enum oo_status status, uint64_t ticket) {
    return status == OO_OK ? PyLong_FromUnsignedLongLong(ticket) : oo__raise_for(object, status);
}

static PyObject *oo__engine_trip_out(PyObject *object, PyObject *const *arguments,
                                     Py_ssize_t count) {
    unsigned long long v[4];
    uint64_t ticket = 0;
    struct oo_engine *engine =
        oo__engine_with(object, "trip_out", arguments, count, oo__download_takes,
                        OO_COUNT_OF(oo__download_takes), v);
    if (!engine)
        return NULL;
    enum oo_status status;
    OO_BLOCKING(status, oo_trip_out(engine, (void *)(uintptr_t)v[0], (uintptr_t)v[1], (size_t)v[2],
                                    (uintptr_t)v[3], &ticket));
    return oo__ticket_or_raise(object, status, ticket);
}

static PyObject *oo__engine_trip_home(PyObject *object, PyObject *const *arguments,
                                      Py_ssize_t count) {
    unsigned long long v[4];
    uint64_t ticket = 0;
    struct oo_engine *engine =
        oo__engine_with(object, "trip_home", arguments, count, oo__download_takes,
                        OO_COUNT_OF(oo__download_takes), v);
    if (!engine)
        return NULL;
    enum oo_status status;
    OO_BLOCKING(status, oo_trip_home(engine, (void *)(uintptr_t)v[0], (uintptr_t)v[1], (size_t)v[2],
                                     (uintptr_t)v[3], &ticket));
    return oo__ticket_or_raise(object, status, ticket);
}

static PyObject *oo__engine_trip_in(PyObject *object, PyObject *const *arguments,
                                    Py_ssize_t count) {
    unsigned long long v[4];
    uint64_t ticket = 0;
    struct oo_engine *engine =
        oo__engine_with(object, "trip_in", arguments, count, oo__download_takes,
                        OO_COUNT_OF(oo__download_takes), v);
    if (!engine)
        return NULL;
    enum oo_status status;
    OO_BLOCKING(status, oo_trip_in(engine, (uintptr_t)v[0], (const void *)(uintptr_t)v[1],
                                   (size_t)v[2], (uintptr_t)v[3], &ticket));
    return oo__ticket_or_raise(object, status, ticket);
}

static const struct oo_parameter oo__trip_back_takes[] = {OO_NUMBER("ticket"), OO_ADDRESS("target"),
                                                          OO_ADDRESS("stream")};

static PyObject *oo__engine_trip_back(PyObject *object, PyObject *const *arguments,
                                      Py_ssize_t count) {
    unsigned long long v[3];
    uint64_t ticket = 0;
    struct oo_engine *engine = OO_ENGINE_WITH(trip_back, count, v);
    if (!engine)
        return NULL;
    enum oo_status status;
    OO_BLOCKING(status, oo_trip_back(engine, v[0], (uintptr_t)v[1], (uintptr_t)v[2], &ticket));
    return oo__ticket_or_raise(object, status, ticket);
}

static const struct oo_parameter oo__trip_join_takes[] = {OO_NUMBER("ticket"),
                                                          OO_ADDRESS("stream")};

static PyObject *oo__engine_trip_join(PyObject *object, PyObject *const *arguments,
                                      Py_ssize_t count) {
    unsigned long long v[2];
    struct oo_engine *engine = OO_ENGINE_WITH(trip_join, count, v);
    if (!engine)
        return NULL;
    enum oo_status status;
    OO_BLOCKING(status, oo_trip_join(engine, v[0], (uintptr_t)v[1]));
    return oo__none_or_raise(object, status);
}

static const struct oo_parameter oo__trip_takes[] = {OO_NUMBER("ticket")};

static struct oo_engine *oo__trip_of(PyObject *object, const char *function, PyObject *argument,
                                     unsigned long long *ticket) {
    PyObject *const arguments[] = {argument};
    return oo__engine_with(object, function, arguments, 1, oo__trip_takes,
                           OO_COUNT_OF(oo__trip_takes), ticket);
}

static PyObject *oo__engine_trip_arrived(PyObject *object, PyObject *argument) {
    unsigned long long ticket;
    int arrived = 0;
    struct oo_engine *engine = oo__trip_of(object, "trip_arrived", argument, &ticket);
    if (!engine)
        return NULL;
    enum oo_status status;
    OO_BLOCKING(status, oo_trip_arrived(engine, ticket, &arrived));
    return status == OO_OK ? PyBool_FromLong(arrived) : oo__raise_for(object, status);
}

static PyObject *oo__engine_trip_await(PyObject *object, PyObject *argument) {
    unsigned long long ticket;
    struct oo_engine *engine = oo__trip_of(object, "trip_await", argument, &ticket);
    if (!engine)
        return NULL;
    enum oo_status status;
    OO_BLOCKING(status, oo_trip_await(engine, ticket));
    return oo__none_or_raise(object, status);
}

static PyObject *oo__engine_trip_end(PyObject *object, PyObject *argument) {
    unsigned long long ticket;
    struct oo_engine *engine = oo__trip_of(object, "trip_end", argument, &ticket);
    if (!engine)
        return NULL;
    enum oo_status status;
    OO_BLOCKING(status, oo_trip_end(engine, ticket));
    return oo__none_or_raise(object, status);
}

static const struct oo_parameter oo__spin_takes[] = {OO_ADDRESS("stream"),
                                                     {"nanoseconds", 0, 10000000000}};

static PyObject *oo__engine_spin(PyObject *object, PyObject *const *arguments, Py_ssize_t count) {
    unsigned long long v[2];
    struct oo_engine *engine = OO_ENGINE_WITH(spin, count, v);
    if (!engine)
        return NULL;
    enum oo_status status;
    OO_BLOCKING(status, oo_engine_spin(engine, (uintptr_t)v[0], v[1]));
    return oo__none_or_raise(object, status);
}

static PyObject *oo__engine_hold(PyObject *object, PyObject *unused) {
    (void)unused;
    struct oo_engine *engine = oo__engine_of(object);
    if (!engine)
        return NULL;
    enum oo_status status;
    OO_BLOCKING(status, oo_engine_hold(engine));
    return oo__none_or_raise(object, status);
}

static const struct oo_parameter oo__is_locked_takes[] = {OO_ADDRESS("memory"), OO_BYTES("nbytes")};

static PyObject *oo__engine_is_locked(PyObject *object, PyObject *const *arguments,
                                      Py_ssize_t count) {
    unsigned long long v[2];
    int locked = 0;
    struct oo_engine *engine = OO_ENGINE_WITH(is_locked, count, v);
    if (!engine)
        return NULL;
    enum oo_status status;
    OO_BLOCKING(status,
                oo_engine_is_locked(engine, (const void *)(uintptr_t)v[0], (size_t)v[1], &locked));
    return status == OO_OK ? PyBool_FromLong(locked) : oo__raise_for(object, status);
}

static PyObject *oo__engine_rest(PyObject *object, PyObject *unused) {
    (void)unused;
    struct oo_engine *engine = oo__engine_of(object);
    if (!engine)
        return NULL;
    enum oo_status status;
    OO_BLOCKING(status, oo_engine_rest(engine));
    return oo__none_or_raise(object, status);
}

static PyObject *oo__engine_settle(PyObject *object, PyObject *unused) {
    (void)unused;
    struct oo_engine *engine = oo__engine_of(object);
    if (!engine)
        return NULL;
    enum oo_status status;
    OO_BLOCKING(status, oo_engine_settle(engine));
    return oo__none_or_raise(object, status);
}

static PyObject *oo__engine_resume(PyObject *object, PyObject *unused) {
    (void)unused;
    struct oo_engine *engine = oo__engine_of(object);
    if (!engine)
        return NULL;
    enum oo_status status;
    OO_BLOCKING(status, oo_engine_resume(engine));
    return oo__none_or_raise(object, status);
}

static const struct oo_parameter oo__refresh_takes[] = {OO_ID("model")};

static PyObject *oo__engine_refresh(PyObject *object, PyObject *argument) {
    PyObject *const arguments[] = {argument};
    unsigned long long model;
    struct oo_engine *engine = OO_ENGINE_WITH(refresh, 1, &model);
    if (!engine)
        return NULL;
    enum oo_status status;
    OO_BLOCKING(status, oo_engine_refresh(engine, (uint32_t)model));
    return oo__none_or_raise(object, status);
}

static PyObject *oo__engine_set_verify(PyObject *object, PyObject *argument) {
    const int on = PyObject_IsTrue(argument);
    struct oo_engine *engine = on < 0 ? NULL : oo__engine_of(object);
    if (!engine)
        return NULL;
    enum oo_status status;
    OO_BLOCKING(status, oo_engine_set_verify(engine, on));
    return oo__none_or_raise(object, status);
}

/* ---- what happened ---- */

static int oo__set_item(PyObject *dict, const char *key, PyObject *value) {
    const int result = value ? PyDict_SetItemString(dict, key, value) : -1;
    Py_XDECREF(value);
    return result;
}

static PyObject *oo__engine_stats(PyObject *object, PyObject *arguments, PyObject *keywords) {
    static char model_name[] = "model";
    static char *names[] = {model_name, NULL};
    static const struct oo_parameter parameter = {"model", -1, UINT32_MAX - 1};
    unsigned long long model = OO_ALL_MODELS;
    PyObject *id = NULL;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "|O", names, &id) ||
        (id && oo__integer(id, "stats", &parameter, &model) < 0))
        return NULL;
    struct oo_engine *engine = oo__engine_of(object);
    if (!engine)
        return NULL;
    struct oo_stats stats;
    enum oo_status status;
    OO_BLOCKING(status, oo_engine_stats(engine, (uint32_t)model, &stats)); /* -1: all */
    if (status != OO_OK)
        return oo__raise_for(object, status);
    PyObject *dict = PyDict_New();
    if (!dict)
        return NULL;
    int failed = 0;
#define OO_COUNT(name, of)                                                                         \
    failed |= oo__set_item(dict, #name, PyLong_FromUnsignedLongLong(stats.name));
#define OO_SECONDS(name, of) failed |= oo__set_item(dict, #name, PyFloat_FromDouble(stats.name));
    OO_COUNTERS(OO_COUNT, OO_SECONDS);
#undef OO_COUNT
#undef OO_SECONDS
    if (failed)
        Py_CLEAR(dict);
    return dict;
}

static PyObject *oo__engine_make_current(PyObject *object, PyObject *unused) {
    (void)unused;
    struct oo_engine *engine = oo__engine_of(object);
    if (!engine)
        return NULL;
    enum oo_status status;
    OO_BLOCKING(status, oo_engine_make_current(engine));
    return oo__none_or_raise(object, status);
}

static PyObject *oo__engine_mem_info(PyObject *object, PyObject *unused) {
    (void)unused;
    struct oo_engine *engine = oo__engine_of(object);
    size_t free_bytes = 0, total_bytes = 0;
    if (!engine)
        return NULL;
    enum oo_status status;
    OO_BLOCKING(status, oo_engine_mem_info(engine, &free_bytes, &total_bytes));
    if (status != OO_OK)
        return oo__raise_for(object, status);
    return Py_BuildValue("KK", (unsigned long long)free_bytes, (unsigned long long)total_bytes);
}

static PyObject *oo__engine_trace_start(PyObject *object, PyObject *unused) {
    (void)unused;
    struct oo_engine *engine = oo__engine_of(object);
    if (!engine)
        return NULL;
    enum oo_status status;
    OO_BLOCKING(status, oo_trace_start(engine));
    return oo__none_or_raise(object, status);
}

static PyObject *oo__engine_trace_stop(PyObject *object, PyObject *unused) {
    (void)unused;
    static const char *const kinds[] = {"compute", "h2d", "d2h", "stall", "decode"};
    struct oo_engine *engine = oo__engine_of(object);
    struct oo_trace_row *rows = NULL;
    size_t count = 0;
    if (!engine)
        return NULL;
    enum oo_status status;
    OO_BLOCKING(status, oo_trace_stop(engine, &rows, &count));
    if (status != OO_OK)
        return oo__raise_for(object, status);
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list && i < count; i++) {
        const long long unit = rows[i].unit == UINT32_MAX ? -1 : (long long)rows[i].unit;
        PyObject *row = Py_BuildValue("{s:s,s:L,s:d,s:d,s:K}", "kind", kinds[rows[i].kind], "unit",
                                      unit, "start_s", rows[i].start_s, "end_s", rows[i].end_s,
                                      "bytes", (unsigned long long)rows[i].bytes);
        if (!row || PyList_Append(list, row) < 0)
            Py_CLEAR(list);
        Py_XDECREF(row);
    }
    oo_trace_free(rows);
    return list;
}

/* Have `call` (engine, rows, capacity, &count) fill `rows`, which is as long as there are rows.
 * Twice at most in the common case: once to learn how many there are. */
#define OO_ALL_ROWS(status, call, engine, rows, count)                                             \
    do {                                                                                           \
        const size_t capacity = count;                                                             \
        PyMem_Free(rows);                                                                          \
        (rows) = PyMem_Malloc((capacity + 1) * sizeof *(rows));                                    \
        if (!(rows))                                                                               \
            return PyErr_NoMemory();                                                               \
        OO_BLOCKING(status, call(engine, rows, capacity, &(count)));                               \
        if ((status) != OO_OK || (count) <= capacity)                                              \
            break;                                                                                 \
    } while (1)

static PyObject *oo__engine_residents(PyObject *object, PyObject *unused) {
    (void)unused;
    struct oo_engine *engine = oo__engine_of(object);
    if (!engine)
        return NULL;
    size_t count = 0;
    struct oo_resident *rows = NULL;
    enum oo_status status;
    OO_ALL_ROWS(status, oo_engine_residents, engine, rows, count);
    PyObject *list = status == OO_OK ? PyList_New(0) : oo__raise_for(object, status);
    for (size_t i = 0; list && i < count; i++) {
        PyObject *row =
            Py_BuildValue("(IKKI)", (unsigned int)rows[i].unit, (unsigned long long)rows[i].address,
                          (unsigned long long)rows[i].bytes, (unsigned int)rows[i].pins);
        if (!row || PyList_Append(list, row) < 0)
            Py_CLEAR(list);
        Py_XDECREF(row);
    }
    PyMem_Free(rows);
    return list;
}

static PyObject *oo__engine_unit_waits(PyObject *object, PyObject *unused) {
    (void)unused;
    struct oo_engine *engine = oo__engine_of(object);
    if (!engine)
        return NULL;
    size_t count = 0;
    struct oo_unit_waits *rows = NULL;
    enum oo_status status;
    OO_ALL_ROWS(status, oo_engine_unit_waits, engine, rows, count);
    PyObject *table = status == OO_OK ? PyDict_New() : oo__raise_for(object, status);
    for (size_t i = 0; table && i < count; i++) {
        PyObject *unit = PyLong_FromUnsignedLong(rows[i].unit);
        PyObject *row = Py_BuildValue("(KKd)", (unsigned long long)rows[i].timed_waits,
                                      (unsigned long long)rows[i].stalls, rows[i].stall_seconds);
        if (!unit || !row || PyDict_SetItem(table, unit, row) < 0)
            Py_CLEAR(table);
        Py_XDECREF(unit);
        Py_XDECREF(row);
    }
    PyMem_Free(rows);
    return table;
}

static const struct oo_parameter oo__journal_start_takes[] = {OO_BYTES("entries")};

static PyObject *oo__engine_journal_start(PyObject *object, PyObject *argument) {
    PyObject *const arguments[] = {argument};
    unsigned long long entries;
    struct oo_engine *engine = OO_ENGINE_WITH(journal_start, 1, &entries);
    if (!engine)
        return NULL;
    enum oo_status status;
    OO_BLOCKING(status, oo_journal_start(engine, (size_t)entries));
    return oo__none_or_raise(object, status);
}

static const struct oo_parameter oo__journal_read_takes[] = {OO_NUMBER("first")};

static PyObject *oo__engine_journal_read(PyObject *object, PyObject *argument) {
    PyObject *const arguments[] = {argument};
    unsigned long long from;
    struct oo_engine *engine = OO_ENGINE_WITH(journal_read, 1, &from);
    if (!engine)
        return NULL;
    enum { ENTRIES = 4096 }; /* of one call */
    struct oo_entry *entries = PyMem_Malloc(ENTRIES * sizeof *entries);
    if (!entries)
        return PyErr_NoMemory();
    uint64_t first = 0;
    size_t count = 0;
    double now_s = 0;
    enum oo_status status;
    OO_BLOCKING(status, oo_journal_read(engine, from, entries, ENTRIES, &first, &count, &now_s));
    PyObject *list = status == OO_OK ? PyList_New(0) : oo__raise_for(object, status);
    for (size_t i = 0; list && i < count; i++) {
        const struct oo_entry *entry = &entries[i];
        const long long unit = entry->unit == UINT32_MAX ? -1 : (long long)entry->unit;
        PyObject *row =
            Py_BuildValue("(iLdKK)", (int)entry->deed, unit, entry->host_s,
                          (unsigned long long)entry->bytes, (unsigned long long)entry->detail);
        if (!row || PyList_Append(list, row) < 0)
            Py_CLEAR(list);
        Py_XDECREF(row);
    }
    PyMem_Free(entries);
    return list ? Py_BuildValue("(KdN)", (unsigned long long)first, now_s, list) : NULL;
}

static PyObject *oo__engine_journal_stop(PyObject *object, PyObject *unused) {
    (void)unused;
    struct oo_engine *engine = oo__engine_of(object);
    if (!engine)
        return NULL;
    enum oo_status status;
    OO_BLOCKING(status, oo_journal_stop(engine));
    return oo__none_or_raise(object, status);
}

static const struct oo_parameter oo__visits_takes[] = {OO_ID("model")};

static PyObject *oo__engine_visits(PyObject *object, PyObject *argument) {
    PyObject *const arguments[] = {argument};
    unsigned long long model;
    struct oo_engine *engine = OO_ENGINE_WITH(visits, 1, &model);
    if (!engine)
        return NULL;
    const size_t capacity = (size_t)2 * OO_MAX_EXPECTED;
    struct oo_visit *visits = PyMem_Malloc(capacity * sizeof *visits);
    if (!visits)
        return PyErr_NoMemory();
    size_t count = 0;
    enum oo_status status;
    OO_BLOCKING(status, oo_engine_visits(engine, (uint32_t)model, visits, capacity, &count));
    PyObject *list = status == OO_OK ? PyList_New(0) : oo__raise_for(object, status);
    for (size_t i = 0; list && i < count; i++) {
        PyObject *row = Py_BuildValue("(Ii)", (unsigned int)visits[i].unit, (int)visits[i].kind);
        if (!row || PyList_Append(list, row) < 0)
            Py_CLEAR(list);
        Py_XDECREF(row);
    }
    PyMem_Free(visits);
    return list;
}

static const struct oo_parameter oo__expect_takes[] = {OO_ID("unit"), {"kind", 0, OO_RECORDED}};

static PyObject *oo__engine_expect(PyObject *object, PyObject *list) {
    PyObject *rows = oo__rows(list, "expect() takes a list of (unit, kind)");
    if (!rows)
        return NULL;
    const Py_ssize_t count = PyTuple_Size(rows);
    PyObject *result = NULL;
    struct oo_visit *visits = PyMem_Malloc(((size_t)count + 1) * sizeof *visits);
    if (!visits) {
        PyErr_NoMemory();
        goto done;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        unsigned long long v[2];
        if (oo__pair(PyTuple_GetItem(rows, i), "an expected use", oo__expect_takes, v) < 0)
            goto done;
        visits[i] = (struct oo_visit){(uint32_t)v[0], (enum oo_kind)v[1]};
    }
    struct oo_engine *engine = oo__engine_of(object);
    if (!engine)
        goto done;
    enum oo_status status;
    OO_BLOCKING(status, oo_engine_expect(engine, visits, (size_t)count));
    result = oo__none_or_raise(object, status);
done:
    Py_DECREF(rows);
    PyMem_Free(visits);
    return result;
}

static const struct oo_parameter oo__pace_takes[] = {OO_ID("model")};

static PyObject *oo__engine_pace(PyObject *object, PyObject *argument) {
    PyObject *const arguments[] = {argument};
    unsigned long long model;
    struct oo_engine *engine = OO_ENGINE_WITH(pace, 1, &model);
    if (!engine)
        return NULL;
    const size_t capacity = (size_t)OO_MAX_EXPECTED;
    struct oo_unit_pace *rows = PyMem_Malloc(capacity * sizeof *rows);
    if (!rows)
        return PyErr_NoMemory();
    size_t count = 0;
    uint64_t link_bps = 0;
    enum oo_status status;
    OO_BLOCKING(status, oo_engine_pace(engine, (uint32_t)model, rows, capacity, &count, &link_bps));
    PyObject *list = status == OO_OK ? PyList_New(0) : oo__raise_for(object, status);
    for (size_t i = 0; list && i < count && i < capacity; i++) {
        PyObject *row = Py_BuildValue("(IK)", (unsigned int)rows[i].unit,
                                      (unsigned long long)rows[i].nanoseconds);
        if (!row || PyList_Append(list, row) < 0)
            Py_CLEAR(list);
        Py_XDECREF(row);
    }
    PyMem_Free(rows);
    return list ? Py_BuildValue("(NK)", list, (unsigned long long)link_bps) : NULL;
}

static const struct oo_parameter oo__expect_pace_takes[] = {OO_NUMBER("link_bps")};
static const struct oo_parameter oo__unit_pace_takes[] = {OO_ID("unit"), OO_NUMBER("nanoseconds")};

static PyObject *oo__engine_expect_pace(PyObject *object, PyObject *const *arguments,
                                        Py_ssize_t count) {
    unsigned long long link_bps;
    if (count != 2 || !PyList_Check(arguments[0])) {
        PyErr_SetString(PyExc_TypeError, "expect_pace() takes a list of (unit, nanoseconds) and "
                                         "the link's bytes in a second");
        return NULL;
    }
    if (oo__integers("expect_pace", arguments + 1, 1, oo__expect_pace_takes, 1, &link_bps) < 0)
        return NULL;
    PyObject *rows = oo__rows(arguments[0], "an expected pace is a list");
    if (!rows)
        return NULL;
    const Py_ssize_t n_rows = PyTuple_Size(rows);
    PyObject *result = NULL;
    struct oo_unit_pace *paces = PyMem_Malloc(((size_t)n_rows + 1) * sizeof *paces);
    if (!paces) {
        PyErr_NoMemory();
        goto done;
    }
    for (Py_ssize_t i = 0; i < n_rows; i++) {
        unsigned long long v[2];
        if (oo__pair(PyTuple_GetItem(rows, i), "an expected pace", oo__unit_pace_takes, v) < 0)
            goto done;
        paces[i] = (struct oo_unit_pace){(uint32_t)v[0], (uint64_t)v[1]};
    }
    struct oo_engine *engine = oo__engine_of(object);
    if (!engine)
        goto done;
    enum oo_status status;
    OO_BLOCKING(status, oo_engine_expect_pace(engine, paces, (size_t)n_rows, (uint64_t)link_bps));
    result = oo__none_or_raise(object, status);
done:
    Py_DECREF(rows);
    PyMem_Free(paces);
    return result;
}

static PyObject *oo__engine_simulated(PyObject *object, void *unused) {
    (void)unused;
    const struct oo_engine *engine = oo__engine_of(object);
    return engine ? PyBool_FromLong(oo_engine_simulated(engine)) : NULL;
}

static PyObject *oo__engine_device_name(PyObject *object, void *unused) {
    (void)unused;
    const struct oo_engine *engine = oo__engine_of(object);
    return engine ? PyUnicode_FromString(oo_engine_device_name(engine)) : NULL;
}

static PyObject *oo__engine_pci_id(PyObject *object, void *unused) {
    (void)unused;
    const struct oo_engine *engine = oo__engine_of(object);
    return engine ? PyUnicode_FromString(oo_engine_pci_id(engine)) : NULL;
}

static PyObject *oo__engine_numa_node(PyObject *object, void *unused) {
    (void)unused;
    const struct oo_engine *engine = oo__engine_of(object);
    return engine ? PyLong_FromLong(oo_engine_numa_node(engine)) : NULL;
}

static PyObject *oo__engine_driver_version(PyObject *object, void *unused) {
    (void)unused;
    const struct oo_engine *engine = oo__engine_of(object);
    return engine ? PyLong_FromLong(oo_engine_driver_version(engine)) : NULL;
}

static PyObject *oo__engine_compute_stream(PyObject *object, void *unused) {
    (void)unused;
    struct oo_engine *engine = oo__engine_of(object);
    uintptr_t stream = 0;
    if (!engine)
        return NULL;
    enum oo_status status;
    OO_BLOCKING(status, oo_engine_compute_stream(engine, &stream));
    return status == OO_OK ? PyLong_FromUnsignedLongLong((unsigned long long)stream)
                           : oo__raise_for(object, status);
}

/* One of the counters: `stats` makes a dict of all, which is too slow for each forward. */
static PyObject *oo__engine_learned_block_bytes(PyObject *object, void *unused) {
    (void)unused;
    struct oo_engine *engine = oo__engine_of(object);
    struct oo_stats stats;
    if (!engine)
        return NULL;
    enum oo_status status;
    OO_BLOCKING(status, oo_engine_stats(engine, OO_ALL_MODELS, &stats));
    return status == OO_OK ? PyLong_FromUnsignedLongLong(stats.learned_block_bytes)
                           : oo__raise_for(object, status);
}

#define OO_FAST(function) (PyCFunction)(void (*)(void)) function, METH_FASTCALL

static PyMethodDef oo__engine_methods[] = {
    {"close", oo__engine_close, METH_NOARGS, "close($self, /)\n--\n\nGive back everything."},
    {"make_current", oo__engine_make_current, METH_NOARGS,
     "make_current($self, /)\n--\n\nLeave the device's context current on this thread."},
    {"mem_info", oo__engine_mem_info, METH_NOARGS,
     "mem_info($self, /)\n--\n\n(free, total) device bytes."},
    {"lock", OO_FAST(oo__engine_lock),
     "lock($self, buffer, nbytes=9223372036854775807, /)\n--\n\nMake a HostBuffer known; page-lock "
     "its first "
     "nbytes."},
    {"lockable", oo__engine_lockable, METH_O,
     "lockable($self, buffer, /)\n--\n\nHow many bytes of it the system would page-lock."},
    {"reserve_rings", oo__engine_reserve_rings, METH_O,
     "reserve_rings($self, nbytes, /)\n--\n\nHave rings of so many page-locked bytes."},
    {"unlock", oo__engine_unlock, METH_O,
     "unlock($self, buffer, /)\n--\n\nMake a HostBuffer ordinary memory."},
    {"keep_in", oo__engine_keep_in, METH_VARARGS,
     "keep_in($self, buffer, kept, /)\n--\n\nKeep bytes of files in a HostBuffer once read."},
    {"add_model", oo__engine_add_model, METH_NOARGS,
     "add_model($self, /)\n--\n\nA new model's id."},
    {"remove_model", oo__engine_remove_model, METH_O,
     "remove_model($self, model, /)\n--\n\nForget a model."},
    {"add_lease", oo__engine_add_lease, METH_NOARGS,
     "add_lease($self, /)\n--\n\nA new lease's id."},
    {"remove_lease", oo__engine_remove_lease, METH_O,
     "remove_lease($self, lease, /)\n--\n\nTake device memory back."},
    {"add_segment", OO_FAST(oo__engine_add_segment),
     "add_segment($self, lease, address, nbytes, stream, /)\n--\n\nLend device memory to the "
     "arena."},
    {"add_staging", OO_FAST(oo__engine_add_staging),
     "add_staging($self, lease, address, nbytes, stream, /)\n--\n\nLend device memory that coded "
     "weights pass through."},
    {"add_unit", oo__engine_add_unit, METH_VARARGS,
     "add_unit($self, model, members, trainable, /)\n--\n\nA new unit."},
    {"move_member", oo__engine_move_member, METH_VARARGS,
     "move_member($self, member, tensors, /)\n--\n\nThe member's tensors live elsewhere now."},
    {"remove_member", oo__engine_remove_member, METH_O,
     "remove_member($self, member, /)\n--\n\nThe member is no longer managed."},
    {"set_trainable", OO_FAST(oo__engine_set_trainable),
     "set_trainable($self, unit, trainable, /)\n--\n\nWhether an optimizer may rewrite the unit."},
    {"acquire", OO_FAST(oo__engine_acquire),
     "acquire($self, member, stream, stamp, kind, task, seconds, /)\n--\n\nMake the member's unit "
     "ready on "
     "a stream."},
    {"use", OO_FAST(oo__engine_use),
     "use($self, member, stream, stamp, kind, task, seconds, stamp_units, /)\n--\n\nacquire and "
     "release, for a `with` block."},
    {"keep", OO_FAST(oo__engine_keep),
     "keep($self, member, stream, offset, nbytes, device_type, device_index, /)\n--\n\nA DLPack "
     "capsule of slot memory that stays until the last alias of its tensor is gone."},
    {"map", OO_FAST(oo__engine_map),
     "map($self, member, stream, nbytes, device_type, device_index, seconds, /)\n--\n\nA DLPack "
     "capsule of locked masters in host memory, or None."},
    {"rewrite", OO_FAST(oo__engine_rewrite),
     "rewrite($self, unit, stream, stamps, /)\n--\n\nThe device writes to the unit's masters, and "
     "to its copy at the address that is returned, or 0."},
    {"written", OO_FAST(oo__engine_written),
     "written($self, unit, stream, /)\n--\n\nThe stream has got what writes to the unit's copy."},
    {"rewritten", OO_FAST(oo__engine_rewritten),
     "rewritten($self, unit, stream, stamps, /)\n--\n\nThe masters are written, and have arrived."},
    {"stamp", oo__engine_stamp, METH_O,
     "stamp($self, stamps, /)\n--\n\nThe stamps of masters that were copied."},
    {"release", OO_FAST(oo__engine_release),
     "release($self, ticket, stream, /)\n--\n\nThe work that uses the unit is queued."},
    {"download", OO_FAST(oo__engine_download),
     "download($self, target, source, nbytes, stream, /)\n--\n\nCopy device bytes to the host and "
     "wait."},
    {"trip_out", OO_FAST(oo__engine_trip_out),
     "trip_out($self, target, source, nbytes, stream, /)\n--\n\nQueue a copy of device bytes to "
     "locked host memory; its ticket."},
    {"trip_home", OO_FAST(oo__engine_trip_home),
     "trip_home($self, target, source, nbytes, stream, /)\n--\n\nQueue a copy of device bytes that "
     "go to locked host memory to stay; its ticket."},
    {"trip_in", OO_FAST(oo__engine_trip_in),
     "trip_in($self, target, source, nbytes, stream, /)\n--\n\nQueue a copy of locked host bytes "
     "to "
     "device memory; its ticket."},
    {"trip_back", OO_FAST(oo__engine_trip_back),
     "trip_back($self, ticket, target, stream, /)\n--\n\nQueue the copy back to device memory; its "
     "ticket."},
    {"trip_join", OO_FAST(oo__engine_trip_join),
     "trip_join($self, ticket, stream, /)\n--\n\nWhat is queued next comes after the copy."},
    {"trip_arrived", oo__engine_trip_arrived, METH_O,
     "trip_arrived($self, ticket, /)\n--\n\nWhether the copy has ended."},
    {"trip_await", oo__engine_trip_await, METH_O,
     "trip_await($self, ticket, /)\n--\n\nWait on the host until the copy has ended."},
    {"trip_end", oo__engine_trip_end, METH_O,
     "trip_end($self, ticket, /)\n--\n\nForget the trip: its host memory may be used again."},
    {"spin", OO_FAST(oo__engine_spin),
     "spin($self, stream, nanoseconds, /)\n--\n\nKeep a stream busy."},
    {"hold", oo__engine_hold, METH_NOARGS,
     "hold($self, /)\n--\n\nTrainable masters may be rewritten."},
    {"settle", oo__engine_settle, METH_NOARGS,
     "settle($self, /)\n--\n\nWait until nothing that is queued reads masters."},
    {"is_locked", OO_FAST(oo__engine_is_locked),
     "is_locked($self, memory, nbytes, /)\n--\n\nWhether all of these host bytes are page-locked."},
    {"rest", oo__engine_rest, METH_NOARGS,
     "rest($self, /)\n--\n\nAs hold, but copies stay until it is known whether to trust them."},
    {"resume", oo__engine_resume, METH_NOARGS,
     "resume($self, /)\n--\n\nTrainable masters are stable."},
    {"refresh", oo__engine_refresh, METH_O,
     "refresh($self, model, /)\n--\n\nAll copies of the model are stale."},
    {"set_verify", oo__engine_set_verify, METH_O,
     "set_verify($self, on, /)\n--\n\nHash whole masters."},
    {"stats", (PyCFunction)(void (*)(void))oo__engine_stats, METH_VARARGS | METH_KEYWORDS,
     "stats($self, model=-1)\n--\n\nOne snapshot of the counters."},
    {"journal_start", oo__engine_journal_start, METH_O,
     "journal_start($self, entries, /)\n--\n\nKeep a journal of the latest entries."},
    {"journal_read", oo__engine_journal_read, METH_O,
     "journal_read($self, first, /)\n--\n\nEntries of the journal from this number on."},
    {"journal_stop", oo__engine_journal_stop, METH_NOARGS,
     "journal_stop($self, /)\n--\n\nEnd the journal."},
    {"trace_start", oo__engine_trace_start, METH_NOARGS,
     "trace_start($self, /)\n--\n\nRecord a timeline."},
    {"trace_stop", oo__engine_trace_stop, METH_NOARGS,
     "trace_stop($self, /)\n--\n\nThe timeline's rows."},
    {"residents", oo__engine_residents, METH_NOARGS,
     "residents($self, /)\n--\n\nThe arena's contents."},
    {"unit_waits", oo__engine_unit_waits, METH_NOARGS,
     "unit_waits($self, /)\n--\n\nThe timed waits for each unit."},
    {"visits", oo__engine_visits, METH_O,
     "visits($self, model, /)\n--\n\nThe latest uses of the model's units."},
    {"expect", oo__engine_expect, METH_O,
     "expect($self, visits, /)\n--\n\nPredict this sweep, which an earlier run has learned."},
    {"pace", oo__engine_pace, METH_O,
     "pace($self, model, /)\n--\n\nWhat forwards of the model's units take, and the link's speed."},
    {"expect_pace", OO_FAST(oo__engine_expect_pace),
     "expect_pace($self, pace, link_bps, /)\n--\n\nPlan by what an earlier run has measured."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef oo__engine_properties[] = {
    {"simulated", oo__engine_simulated, NULL, "Whether the driver is the simulated one.", NULL},
    {"device_name", oo__engine_device_name, NULL, "Name of the device.", NULL},
    {"pci_id", oo__engine_pci_id, NULL, "PCI bus id of the device.", NULL},
    {"numa_node", oo__engine_numa_node, NULL, "NUMA node nearest to the device, or -1.", NULL},
    {"driver_version", oo__engine_driver_version, NULL, "12040 means 12.4.", NULL},
    {"compute_stream", oo__engine_compute_stream, NULL, "A stream for callers that have none.",
     NULL},
    {"learned_block_bytes", oo__engine_learned_block_bytes, NULL,
     "Of the largest checkpointed block seen so far.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static char oo__engine_doc[] = "Engine(library, device)\n--\n\nThe engine of one device.";

static PyType_Slot oo__engine_slots[] = {
    {Py_tp_doc, oo__engine_doc},
    {Py_tp_new, (void *)oo__engine_new},
    {Py_tp_dealloc, (void *)oo__engine_dealloc},
    {Py_tp_methods, oo__engine_methods},
    {Py_tp_getset, oo__engine_properties},
    {0, NULL},
};

PyType_Spec oo__engine_spec = {
    .name = "oracle_offload._core.Engine",
    .basicsize = sizeof(struct oo_py_engine),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = oo__engine_slots,
};
