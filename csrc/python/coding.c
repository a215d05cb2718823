/* coding.c - the codec of whole tensors, and what shows that they were written, as functions of the
 * module. They take addresses; the caller keeps the memory alive. */
#include "binding.h"

#include <limits.h>

#define OO_KIND(name) {name, OO_CODEC_BF16, OO_CODEC_INT8}
static const struct oo_parameter oo__coded_takes[] = {
    OO_KIND("kind"),      OO_ADDRESS("coded"),   OO_BYTES("nbytes"),
    OO_NUMBER("threads"), OO_ADDRESS("weights"), {"count", 1, PTRDIFF_MAX / 4}};

static unsigned oo__threads(unsigned long long asked) {
    return asked > UINT32_MAX ? UINT32_MAX : (unsigned)asked;
}

static PyObject *oo__coded_room(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    (void)module;
    static const struct oo_parameter takes[] = {OO_KIND("kind"), {"count", 1, PTRDIFF_MAX / 4}};
    unsigned long long v[2];
    if (oo__integers("coded_room", arguments, count, takes, OO_COUNT_OF(takes), v) < 0)
        return NULL;
    return PyLong_FromSize_t(oo_coded_room((enum oo_codec_kind)v[0], (size_t)v[1]));
}

static PyObject *oo__encode(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    unsigned long long v[6];
    size_t bytes = 0;
    if (oo__integers("encode", arguments, count, oo__coded_takes, OO_COUNT_OF(oo__coded_takes), v) <
        0)
        return NULL;
    const enum oo_codec_kind kind = (enum oo_codec_kind)v[0];
    if (v[2] < oo_coded_room(kind, (size_t)v[5]))
        return PyErr_Format(PyExc_ValueError,
                            "encode(): nbytes is %llu, but %llu weights may need %zu", v[2], v[5],
                            oo_coded_room(kind, (size_t)v[5]));
    enum oo_status status;
    Py_BEGIN_ALLOW_THREADS
    status = oo_coded_encode(kind, (const void *)(uintptr_t)v[4], (size_t)v[5], oo__threads(v[3]),
                             (void *)(uintptr_t)v[1], &bytes);
    Py_END_ALLOW_THREADS
    return status == OO_OK ? PyLong_FromSize_t(bytes) : oo_raise(oo__state(module), status);
}

enum oo_reading_of { OO_DECODES, OO_COMPARES, OO_CHECKS };

static PyObject *oo__read_coded(PyObject *module, const char *name, enum oo_reading_of how,
                                PyObject *const *arguments, Py_ssize_t count) {
    unsigned long long v[6];
    if (oo__integers(name, arguments, count, oo__coded_takes, OO_COUNT_OF(oo__coded_takes), v) < 0)
        return NULL;
    const enum oo_codec_kind kind = (enum oo_codec_kind)v[0];
    const void *coded = (const void *)(uintptr_t)v[1];
    void *weights = (void *)(uintptr_t)v[4];
    const size_t bytes = (size_t)v[2], n = (size_t)v[5];
    const unsigned threads = oo__threads(v[3]);
    enum oo_status status;
    Py_BEGIN_ALLOW_THREADS
    status = how == OO_DECODES    ? oo_coded_decode(kind, coded, bytes, threads, weights, n)
             : how == OO_COMPARES ? oo_coded_compare(kind, coded, bytes, threads, weights, n)
                                  : oo_coded_check(kind, coded, bytes, threads, n);
    Py_END_ALLOW_THREADS
    if (status != OO_OK)
        return oo_raise(oo__state(module), status);
    Py_RETURN_NONE;
}

static PyObject *oo__decode(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    return oo__read_coded(module, "decode", OO_DECODES, arguments, count);
}

static PyObject *oo__compare(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    return oo__read_coded(module, "compare_coded", OO_COMPARES, arguments, count);
}

static PyObject *oo__check(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    return oo__read_coded(module, "check_coded", OO_CHECKS, arguments, count);
}

static const struct oo_parameter oo__memory_takes[] = {OO_ADDRESS("address"), OO_BYTES("nbytes")};

static PyObject *oo__fingerprint_of(PyObject *module, PyObject *const *arguments,
                                    Py_ssize_t count) {
    (void)module;
    unsigned long long v[2];
    uint64_t hash;
    if (oo__integers("fingerprint", arguments, count, oo__memory_takes,
                     OO_COUNT_OF(oo__memory_takes), v) < 0)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    hash = oo_fingerprint((const void *)(uintptr_t)v[0], (size_t)v[1]);
    Py_END_ALLOW_THREADS
    return PyLong_FromUnsignedLongLong(hash);
}

static PyObject *oo__pages_written_of(PyObject *module, PyObject *const *arguments,
                                      Py_ssize_t count) {
    (void)module;
    unsigned long long v[2];
    if (oo__integers("pages_written", arguments, count, oo__memory_takes,
                     OO_COUNT_OF(oo__memory_takes), v) < 0)
        return NULL;
    const int written = oo_pages_written((const void *)(uintptr_t)v[0], (size_t)v[1]);
    if (written < 0)
        Py_RETURN_NONE;
    return PyBool_FromLong(written);
}

static PyObject *oo__pages_show_of(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    (void)module;
    static const struct oo_parameter takes[] = {
        OO_ADDRESS("address"), OO_BYTES("nbytes"), {"descriptor", 0, INT_MAX}, OO_BYTES("begin")};
    unsigned long long v[4];
    if (oo__integers("pages_show", arguments, count, takes, OO_COUNT_OF(takes), v) < 0)
        return NULL;
    if (oo_pages_show((void *)(uintptr_t)v[0], (size_t)v[1], (int)v[2], v[3]) < 0)
        return PyErr_SetFromErrno(PyExc_OSError);
    Py_RETURN_NONE;
}

static PyObject *oo__section_or_error(int section) {
    return section < 0 ? PyErr_SetFromErrno(PyExc_OSError) : PyLong_FromLong(section);
}

static PyObject *oo__section_create_of(PyObject *module, PyObject *const *arguments,
                                       Py_ssize_t count) {
    (void)module;
    static const struct oo_parameter takes[] = {OO_BYTES("nbytes")};
    unsigned long long v[1];
    if (oo__integers("section_create", arguments, count, takes, OO_COUNT_OF(takes), v) < 0)
        return NULL;
    return oo__section_or_error(oo_section_create((size_t)v[0]));
}

static PyObject *oo__section_take_of(PyObject *module, PyObject *const *arguments,
                                     Py_ssize_t count) {
    (void)module;
    static const struct oo_parameter takes[] = {{"process", 0, UINT_MAX}, {"theirs", 0, INT_MAX}};
    unsigned long long v[2];
    if (oo__integers("section_take", arguments, count, takes, OO_COUNT_OF(takes), v) < 0)
        return NULL;
    return oo__section_or_error(oo_section_take((unsigned)v[0], (int)v[1]));
}

static PyObject *oo__section_close_of(PyObject *module, PyObject *const *arguments,
                                      Py_ssize_t count) {
    (void)module;
    static const struct oo_parameter takes[] = {{"section", 0, INT_MAX}};
    unsigned long long v[1];
    if (oo__integers("section_close", arguments, count, takes, OO_COUNT_OF(takes), v) < 0)
        return NULL;
    oo_section_close((int)v[0]);
    Py_RETURN_NONE;
}

static PyObject *oo__pages_own_of(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    (void)module;
    unsigned long long v[2];
    int status;
    if (oo__integers("pages_own", arguments, count, oo__memory_takes, OO_COUNT_OF(oo__memory_takes),
                     v) < 0)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = oo_pages_own((void *)(uintptr_t)v[0], (size_t)v[1]);
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(status == 0);
}

#define OO_FUNCTION(name, function, text)                                                          \
    {name, (PyCFunction)(void (*)(void))(function), METH_FASTCALL, text}

PyMethodDef oo__coded_functions[] = {
    OO_FUNCTION("coded_room", oo__coded_room,
                "coded_room(kind, count, /)\n--\n\nBytes that encode() needs at coded."),
    OO_FUNCTION("encode", oo__encode,
                "encode(kind, coded, nbytes, threads, weights, count, /)\n--\n\nBytes written."),
    OO_FUNCTION("decode", oo__decode,
                "decode(kind, coded, nbytes, threads, weights, count, /)\n--\n\nWrite weights."),
    OO_FUNCTION("compare_coded", oo__compare,
                "compare_coded(kind, coded, nbytes, threads, weights, count, /)\n--\n\n"
                "ValueError where these are other weights."),
    OO_FUNCTION("check_coded", oo__check,
                "check_coded(kind, coded, nbytes, threads, weights, count, /)\n--\n\n"
                "ValueError where a checksum differs; weights is not read."),
    OO_FUNCTION("fingerprint", oo__fingerprint_of,
                "fingerprint(address, nbytes, /)\n--\n\nA hash of all bytes."),
    OO_FUNCTION("pages_written", oo__pages_written_of,
                "pages_written(address, nbytes, /)\n--\n\n"
                "Whether a private mapping was written; None: not known."),
    OO_FUNCTION("pages_show", oo__pages_show_of,
                "pages_show(address, nbytes, descriptor, begin, /)\n--\n\n"
                "Let mapped pages show a file, copied on write; OSError."),
    OO_FUNCTION("section_create", oo__section_create_of,
                "section_create(nbytes, /)\n--\n\nMemory without a name, to be shared; OSError."),
    OO_FUNCTION("section_take", oo__section_take_of,
                "section_take(process, theirs, /)\n--\n\nThat of another process; OSError."),
    OO_FUNCTION("section_close", oo__section_close_of,
                "section_close(section, /)\n--\n\nIt stays as long as it is mapped."),
    OO_FUNCTION("pages_own", oo__pages_own_of,
                "pages_own(address, nbytes, /)\n--\n\n"
                "Copy pages of a file to memory, where they are; whether that worked."),
    {NULL, NULL, 0, NULL},
};
