/* taken.c - what is taken for the length of a `with` block, and given back whatever happens.
 *
 * An interrupt (Ctrl-C) is raised between two instructions of Python: also between a call that has
 * taken something and the `try` that would give it back, and in the middle of what gives it back.
 * So both are calls of C. What `with` calls, or holds on the interpreter's stack when it is
 * interrupted on the way, gives back at the block's end, or as it goes. No frame may keep these
 * objects in a variable: a traceback keeps frames. */
#include "binding.h"

static void oo__free_object(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(object);
    Py_DECREF(type);
}

/* ---- a use of a unit ---- */

/* The garbage collector does not track uses: one is made for each call of a layer. No circle leads
 * back to it: an engine holds no object, and `stamp_units`, which is there before the use and after
 * it, does not refer to it. */
struct oo_py_use {
    PyObject_HEAD PyObject *engine; /* NULL once it has ended */
    PyObject *stamp_units;          /* called with the units whose copies a call has enqueued */
    uint64_t ticket;
    uintptr_t address, stream;
};

/* Have the copies stamped that were enqueued; where that fails, or is interrupted, they are not
 * trusted. An exception is set in that case. */
static int oo__stamp(const struct oo_py_use *self, PyObject *engine,
                     const struct oo_fetched *fetched) {
    if (!fetched->count)
        return 0;
    PyObject *units = oo__units_tuple(fetched->units, fetched->count);
    PyObject *done = units ? PyObject_CallFunctionObjArgs(self->stamp_units, units, NULL) : NULL;
    Py_XDECREF(units);
    Py_XDECREF(done);
    if (!done)
        oo__distrust_units(engine, fetched);
    return done ? 0 : -1;
}

PyObject *oo__use_begin(PyTypeObject *type, PyObject *engine, const struct oo_request *request,
                        PyObject *stamp_units) {
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    struct oo_py_use *self = (struct oo_py_use *)allocate(type, 0);
    struct oo_use use;
    if (!self)
        return NULL;
    if (oo__acquire_use(engine, request, &use) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    self->engine = Py_NewRef(engine);
    self->stamp_units = Py_NewRef(stamp_units);
    self->ticket = use.ticket;
    self->address = use.address;
    self->stream = request->stream;
    if (oo__stamp(self, engine, &use.fetched) < 0)
        Py_CLEAR(self); /* which ends the use */
    return (PyObject *)self;
}

/* End the use. What the release has begun to copy is stamped, or by a finalizer, which runs nothing
 * of Python, not trusted. */
static int oo__use_end(struct oo_py_use *self, int is_finalizer) {
    PyObject *engine = self->engine;
    struct oo_fetched fetched;
    if (!engine)
        return 0;
    self->engine = NULL;
    int status = oo__release_use(engine, self->ticket, self->stream, &fetched);
    if (status == 0 && is_finalizer)
        oo__distrust_units(engine, &fetched);
    else if (status == 0)
        status = oo__stamp(self, engine, &fetched);
    Py_DECREF(engine);
    Py_CLEAR(self->stamp_units);
    return status;
}

static PyObject *oo__use_enter(PyObject *object, PyObject *unused) {
    (void)unused;
    return PyLong_FromUnsignedLongLong(((struct oo_py_use *)object)->address);
}

static PyObject *oo__use_exit(PyObject *object, PyObject *const *details, Py_ssize_t count) {
    (void)details;
    (void)count;
    if (oo__use_end((struct oo_py_use *)object, 0) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static void oo__use_dealloc(PyObject *object) {
    PyObject *kind, *value, *traceback;
    PyErr_Fetch(&kind, &value, &traceback);
    if (oo__use_end((struct oo_py_use *)object, 1) < 0)
        PyErr_WriteUnraisable(NULL);
    PyErr_Restore(kind, value, traceback);
    oo__free_object(object);
}

static PyMethodDef oo__use_methods[] = {
    {"__enter__", oo__use_enter, METH_NOARGS,
     "__enter__($self, /)\n--\n\nThe device address of the unit."},
    {"__exit__", (PyCFunction)(void (*)(void))oo__use_exit, METH_FASTCALL,
     "__exit__($self, /, *details)\n--\n\nThe work that uses the unit has been queued."},
    {NULL, NULL, 0, NULL},
};

static char oo__use_doc[] = "A use of a unit, for a `with` block.";

static PyType_Slot oo__use_slots[] = {
    {Py_tp_doc, oo__use_doc},
    {Py_tp_dealloc, (void *)oo__use_dealloc},
    {Py_tp_methods, oo__use_methods},
    {0, NULL},
};

PyType_Spec oo__use_spec = {
    .name = "oracle_offload._core.Use",
    .basicsize = sizeof(struct oo_py_use),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = oo__use_slots,
};

/* ---- what two callables take and give back ---- */

struct oo_py_taken {
    PyObject_HEAD PyObject *take, *give;
    int is_taken;
};

static PyObject *oo__taken_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
    PyObject *take, *give;
    static char take_name[] = "take", give_name[] = "give";
    static char *names[] = {take_name, give_name, NULL};
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "OO", names, &take, &give))
        return NULL;
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    struct oo_py_taken *self = (struct oo_py_taken *)allocate(type, 0);
    if (!self)
        return NULL;
    self->take = Py_NewRef(take);
    self->give = Py_NewRef(give);
    return (PyObject *)self;
}

static PyObject *oo__taken_enter(PyObject *object, PyObject *unused) {
    (void)unused;
    struct oo_py_taken *self = (struct oo_py_taken *)object;
    PyObject *result = PyObject_CallNoArgs(self->take);
    self->is_taken = result && result != Py_False;
    return result;
}

/* Callers choose what is called, so it may lead back here. Only the collector finds such a circle.
 * There is nothing to clear: what is called is given when the object is made, so another object of
 * the circle was changed later, and can be again. */
static int oo__taken_traverse(PyObject *object, visitproc visit, void *arg) {
    struct oo_py_taken *self = (struct oo_py_taken *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->take);
    Py_VISIT(self->give);
    return 0;
}

/* An exception that cuts it short is an interrupt: what was begun is done again, to its end. */
static int oo__taken_end(struct oo_py_taken *self) {
    if (!self->is_taken)
        return 0;
    self->is_taken = 0;
    PyObject *done = PyObject_CallNoArgs(self->give);
    if (!done) {
        PyObject *kind, *value, *traceback;
        PyErr_Fetch(&kind, &value, &traceback);
        PyObject *again = PyObject_CallNoArgs(self->give);
        if (!again)
            PyErr_Clear();
        Py_XDECREF(again);
        PyErr_Restore(kind, value, traceback);
        return -1;
    }
    Py_DECREF(done);
    return 0;
}

static PyObject *oo__taken_exit(PyObject *object, PyObject *const *details, Py_ssize_t count) {
    (void)details;
    (void)count;
    if (oo__taken_end((struct oo_py_taken *)object) < 0)
        return NULL;
    Py_RETURN_NONE;
}

/* Of a circle the collector calls it first, while what gives back is whole. */
static void oo__taken_finalize(PyObject *object) {
    struct oo_py_taken *self = (struct oo_py_taken *)object;
    PyObject *kind, *value, *traceback;
    PyErr_Fetch(&kind, &value, &traceback);
    if (oo__taken_end(self) < 0)
        PyErr_WriteUnraisable(self->give);
    PyErr_Restore(kind, value, traceback);
}

static void oo__taken_dealloc(PyObject *object) {
    struct oo_py_taken *self = (struct oo_py_taken *)object;
    PyObject_GC_UnTrack(object);
    oo__taken_finalize(object);
    Py_XDECREF(self->take);
    Py_XDECREF(self->give);
    oo__free_object(object);
}

static PyMethodDef oo__taken_methods[] = {
    {"__enter__", oo__taken_enter, METH_NOARGS,
     "__enter__($self, /)\n--\n\nWhat `take` returns; after False nothing is given back."},
    {"__exit__", (PyCFunction)(void (*)(void))oo__taken_exit, METH_FASTCALL,
     "__exit__($self, /, *details)\n--\n\nCall `give`."},
    {NULL, NULL, 0, NULL},
};

static char oo__taken_doc[] =
    "Taken(take, give)\n--\n\nCall one at the begin of a `with` block, the other at its end.";

static PyType_Slot oo__taken_slots[] = {
    {Py_tp_doc, oo__taken_doc},
    {Py_tp_new, (void *)oo__taken_new},
    {Py_tp_dealloc, (void *)oo__taken_dealloc},
    {Py_tp_traverse, (void *)oo__taken_traverse},
    {Py_tp_finalize, (void *)oo__taken_finalize},
    {Py_tp_methods, oo__taken_methods},
    {0, NULL},
};

PyType_Spec oo__taken_spec = {
    .name = "oracle_offload._core.Taken",
    .basicsize = sizeof(struct oo_py_taken),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_HAVE_GC,
    .slots = oo__taken_slots,
};
