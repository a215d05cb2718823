/* host_buffer.c - HostBuffer: host memory as a Python buffer. */
#include "binding.h"

static PyObject *oo__buffer_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
    static char nbytes_name[] = "nbytes", node_name[] = "node", file_name[] = "file",
                begin_name[] = "begin", path_name[] = "path";
    static char *names[] = {nbytes_name, node_name, file_name, begin_name, path_name, NULL};
    static const struct oo_parameter parameter = {"nbytes", 1, PTRDIFF_MAX};
    static const struct oo_parameter offset = {"begin", 0, PTRDIFF_MAX};
    PyObject *argument, *first = NULL;
    unsigned long long nbytes, begin = 0;
    int node = -1, file = -1;
    PyObject *path = NULL; /* of bytes: a file's name may be no text */
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "O|iiOS", names, &argument, &node, &file,
                                     &first, &path) ||
        oo__integer(argument, "HostBuffer", &parameter, &nbytes) < 0 ||
        (first && oo__integer(first, "HostBuffer", &offset, &begin) < 0))
        return NULL;
    struct oo_module_state *state = oo__state_of(type);
    struct oo_host *host = NULL;
    enum oo_status status;
    if (path && PyBytes_Size(path))
        status = oo_host_create_file(PyBytes_AsString(path), file, &host);
    else if (file < 0)
        status = oo_host_create((size_t)nbytes, &host);
    else
        status = oo_host_create_shared((size_t)nbytes, file, begin, &host);
    if (status != OO_OK)
        return oo_raise(state, status);
    nbytes = oo_host_bytes(host);
    oo_host_prefer_node(host, node);
    PyObject *engines = PyList_New(0);
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    struct oo_py_buffer *self = engines ? (struct oo_py_buffer *)allocate(type, 0) : NULL;
    if (!self) {
        Py_XDECREF(engines);
        oo_host_destroy(host);
        return NULL;
    }
    self->host = host;
    self->engines = engines;
    state->live_buffers++;
    state->live_buffer_bytes += (size_t)nbytes;
    return (PyObject *)self;
}

static void oo__buffer_dealloc(PyObject *object) {
    struct oo_py_buffer *self = (struct oo_py_buffer *)object;
    PyTypeObject *type = Py_TYPE(object);
    struct oo_module_state *state = oo__state_of(type);
    if (self->host) {
        state->live_buffers--;
        state->live_buffer_bytes -= oo_host_bytes(self->host);
        /* May wait for copies; nothing of Python is touched meanwhile. */
        enum oo_status status;
        Py_BEGIN_ALLOW_THREADS
        status = oo_host_destroy(self->host);
        Py_END_ALLOW_THREADS
        oo__report(type, status);
    }
    Py_XDECREF(self->engines);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(object);
    Py_DECREF(type);
}

static int oo__buffer_get(PyObject *object, Py_buffer *view, int flags) {
    const struct oo_py_buffer *self = (struct oo_py_buffer *)object;
    return PyBuffer_FillInfo(view, object, oo_host_address(self->host),
                             (Py_ssize_t)oo_host_bytes(self->host), 0, flags);
}

static PyObject *oo__buffer_fill(PyObject *object, PyObject *const *arguments, Py_ssize_t count) {
    const struct oo_py_buffer *self = (struct oo_py_buffer *)object;
    static const struct oo_parameter parameters[] = {OO_BYTES("offset"), OO_ADDRESS("source"),
                                                     OO_BYTES("nbytes")};
    unsigned long long v[3];
    if (oo__integers("fill", arguments, count, parameters, OO_COUNT_OF(parameters), v) < 0)
        return NULL;
    enum oo_status status;
    Py_BEGIN_ALLOW_THREADS
    status = oo_host_fill(self->host, (size_t)v[0], (const void *)(uintptr_t)v[1], (size_t)v[2]);
    Py_END_ALLOW_THREADS
    if (status != OO_OK)
        return oo_raise(oo__state_of(Py_TYPE(object)), status);
    Py_RETURN_NONE;
}

static PyObject *oo__buffer_check(PyObject *object, PyObject *const *arguments, Py_ssize_t count) {
    static const struct oo_parameter parameters[] = {OO_BYTES("offset"), OO_BYTES("nbytes")};
    const struct oo_host *host = ((struct oo_py_buffer *)object)->host;
    unsigned long long v[2];
    if (oo__integers("check", arguments, count, parameters, OO_COUNT_OF(parameters), v) < 0)
        return NULL;
    const enum oo_status status = oo_host_check(host, (size_t)v[0], (size_t)v[1]);
    if (status != OO_OK)
        return oo_raise(oo__state_of(Py_TYPE(object)), status);
    Py_RETURN_NONE;
}

static PyObject *oo__buffer_protect(PyObject *object, PyObject *writable) {
    const int write = PyObject_IsTrue(writable);
    if (write < 0)
        return NULL;
    enum oo_status status = oo_host_protect(((struct oo_py_buffer *)object)->host, write);
    if (status != OO_OK)
        return oo_raise(oo__state_of(Py_TYPE(object)), status);
    Py_RETURN_NONE;
}

static PyObject *oo__buffer_address(PyObject *object, void *unused) {
    (void)unused;
    return PyLong_FromVoidPtr(oo_host_address(((struct oo_py_buffer *)object)->host));
}

static PyObject *oo__buffer_nbytes(PyObject *object, void *unused) {
    (void)unused;
    return PyLong_FromSize_t(oo_host_bytes(((struct oo_py_buffer *)object)->host));
}

static PyObject *oo__buffer_locked(PyObject *object, void *unused) {
    (void)unused;
    return PyBool_FromLong(oo_host_locked(((struct oo_py_buffer *)object)->host));
}

static PyObject *oo__buffer_known(PyObject *object, void *unused) {
    (void)unused;
    return PyBool_FromLong(oo_host_known(((struct oo_py_buffer *)object)->host));
}

static PyObject *oo__buffer_arrived(PyObject *object, void *unused) {
    (void)unused;
    return PyLong_FromSize_t(oo_host_arrived(((struct oo_py_buffer *)object)->host));
}

static PyMethodDef oo__buffer_methods[] = {
    {"fill", (PyCFunction)(void (*)(void))oo__buffer_fill, METH_FASTCALL,
     "fill($self, offset, source, nbytes, /)\n--\n\nCopy nbytes from address source to offset."},
    {"check", (PyCFunction)(void (*)(void))oo__buffer_check, METH_FASTCALL,
     "check($self, offset, nbytes, /)\n--\n\nRefuse bytes of a file that was written since."},
    {"protect", oo__buffer_protect, METH_O,
     "protect($self, writable, /)\n--\n\nLet this process write the memory, or read it alone."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef oo__buffer_properties[] = {
    {"address", oo__buffer_address, NULL, "Address of the first byte.", NULL},
    {"nbytes", oo__buffer_nbytes, NULL, "Size in bytes.", NULL},
    {"arrived", oo__buffer_arrived, NULL, "Bytes of files that were read into it.", NULL},
    {"known", oo__buffer_known, NULL, "Whether an engine knows the memory.", NULL},
    {"locked", oo__buffer_locked, NULL, "Whether the pages are locked for the device.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static char oo__buffer_doc[] = "HostBuffer(nbytes, node=-1, file=-1, begin=0, "
                               "path=b'')\n--\n\nPage-aligned host memory for masters.";

static PyType_Slot oo__buffer_slots[] = {
    {Py_tp_doc, oo__buffer_doc},
    {Py_tp_new, (void *)oo__buffer_new},
    {Py_tp_dealloc, (void *)oo__buffer_dealloc},
    {Py_tp_methods, oo__buffer_methods},
    {Py_tp_getset, oo__buffer_properties},
    {Py_bf_getbuffer, (void *)oo__buffer_get},
    {0, NULL},
};

PyType_Spec oo__host_buffer_spec = {
    .name = "oracle_offload._core.HostBuffer",
    .basicsize = sizeof(struct oo_py_buffer),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = oo__buffer_slots,
};
