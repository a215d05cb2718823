/* objects.h - Python as the operators see it: references, attributes and numbers. */
#ifndef OO_OBJECTS_H
#define OO_OBJECTS_H

#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <array>
#include <optional>
#include <vector>

namespace oo {

using Sizes = std::vector<int64_t>;
using Flags = std::vector<bool>;

/* Each attribute that is asked for, interned. */
#define NAMES(NAME)                                                                                \
    NAME(LEAST_BYTES)                                                                              \
    NAME(_conv_forward)                                                                            \
    NAME(_is_profiler_enabled)                                                                     \
    NAME(_noted)                                                                                   \
    NAME(attachment)                                                                               \
    NAME(begin_forward)                                                                            \
    NAME(begin_use)                                                                                \
    NAME(backward_reads)                                                                           \
    NAME(backward_seconds)                                                                         \
    NAME(changed)                                                                                  \
    NAME(coded)                                                                                    \
    NAME(dilation)                                                                                 \
    NAME(engine)                                                                                   \
    NAME(former)                                                                                   \
    NAME(forward_seconds)                                                                          \
    NAME(flush)                                                                                    \
    NAME(gradients)                                                                                \
    NAME(groups)                                                                                   \
    NAME(has_stale_codes)                                                                          \
    NAME(masters)                                                                                  \
    NAME(member)                                                                                   \
    NAME(module)                                                                                   \
    NAME(moving)                                                                                   \
    NAME(native)                                                                                   \
    NAME(next_look)                                                                                \
    NAME(of)                                                                                       \
    NAME(pace)                                                                                     \
    NAME(padding)                                                                                  \
    NAME(padding_mode)                                                                             \
    NAME(padding_of)                                                                               \
    NAME(parameters)                                                                               \
    NAME(present)                                                                                  \
    NAME(read_arguments)                                                                           \
    NAME(serial)                                                                                   \
    NAME(simulated)                                                                                \
    NAME(stamp_units)                                                                              \
    NAME(stand_ins)                                                                                \
    NAME(state)                                                                                    \
    NAME(stream)                                                                                   \
    NAME(stride)                                                                                   \
    NAME(structure)                                                                                \
    NAME(taking)                                                                                   \
    NAME(tasks_with_gradients)                                                                     \
    NAME(time)                                                                                     \
    NAME(to_host)                                                                                  \
    NAME(turned)                                                                                   \
    NAME(uses)                                                                                     \
    NAME(view_at)                                                                                  \
    NAME(views)                                                                                    \
    NAME(was_coded_written)                                                                        \
    NAME(weight)
struct Names {
#define DECLARE(name) PyObject *name;
    NAMES(DECLARE)
#undef DECLARE
};
inline Names names;

/* An exception of Python as one of C++, which may cross threads. */
[[noreturn]] inline void raise() {
    python_error error;
    error.persist();
    throw error;
}

/* A reference of its own; the GIL is held wherever it ends. */
class Owned {
  public:
    Owned() = default;
    /* What a call has returned: nullptr is its exception. */
    explicit Owned(PyObject *returned) : object(returned) {
        if (!object)
            raise();
    }
    Owned(Owned &&other) noexcept : object(std::exchange(other.object, nullptr)) {}
    Owned &operator=(Owned &&other) noexcept {
        std::swap(object, other.object);
        return *this;
    }
    Owned(const Owned &) = delete;
    ~Owned() { Py_XDECREF(object); }
    operator PyObject *() const { return object; }
    PyObject *release() { return std::exchange(object, nullptr); }

  private:
    PyObject *object = nullptr;
};

inline Owned get(PyObject *object, PyObject *name) { return Owned(PyObject_GetAttr(object, name)); }

/* A method's answer. */
template <typename... Arguments> Owned ask(PyObject *object, PyObject *method, Arguments... given) {
    return Owned(PyObject_CallMethodObjArgs(object, method, static_cast<PyObject *>(given)...,
                                            static_cast<PyObject *>(nullptr)));
}

/* The value under a key, borrowed; nullptr where there is none. */
inline PyObject *find(PyObject *dict, PyObject *key) {
    PyObject *value = PyDict_GetItemWithError(dict, key);
    if (!value && PyErr_Occurred())
        raise();
    return value;
}

inline bool is_true(PyObject *value) {
    const int truth = value == Py_True ? 1 : PyObject_IsTrue(value);
    if (truth < 0)
        raise();
    return truth != 0;
}

inline bool is_true(PyObject *object, PyObject *name) { return is_true(get(object, name)); }

inline int64_t integer(PyObject *number) {
    const int64_t value = PyLong_AsLongLong(number);
    if (value == -1 && PyErr_Occurred())
        raise();
    return value;
}

inline int64_t integer(PyObject *object, PyObject *name) { return integer(get(object, name)); }

inline uint64_t address(PyObject *number) {
    const uint64_t value = PyLong_AsUnsignedLongLong(number);
    if (value == UINT64_MAX && PyErr_Occurred())
        raise();
    return value;
}

inline double number(PyObject *object) {
    const double value = PyFloat_AsDouble(object);
    if (value == -1 && PyErr_Occurred())
        raise();
    return value;
}

inline Owned tuple_of(const Sizes &values) {
    Owned tuple(PyTuple_New(static_cast<Py_ssize_t>(values.size())));
    for (size_t i = 0; i < values.size(); i++)
        PyTuple_SET_ITEM(tuple, static_cast<Py_ssize_t>(i),
                         Owned(PyLong_FromLongLong(values[i])).release());
    return tuple;
}

inline Owned tuple_of(const Flags &values) {
    Owned tuple(PyTuple_New(static_cast<Py_ssize_t>(values.size())));
    for (size_t i = 0; i < values.size(); i++)
        PyTuple_SET_ITEM(tuple, static_cast<Py_ssize_t>(i),
                         Py_NewRef(values[i] ? Py_True : Py_False));
    return tuple;
}

/* The integers of a tuple, if it has so many of them and nothing else. */
inline std::optional<Sizes> sizes_in(PyObject *tuple, size_t count) {
    if (!PyTuple_Check(tuple) || PyTuple_Size(tuple) != static_cast<Py_ssize_t>(count))
        return {};
    Sizes values;
    for (size_t i = 0; i < count; i++) {
        PyObject *value = PyTuple_GetItem(tuple, static_cast<Py_ssize_t>(i));
        if (!PyLong_Check(value))
            return {};
        values.push_back(integer(value));
    }
    return values;
}

inline at::Tensor tensor_in(PyObject *object) {
    return object == Py_None ? at::Tensor() : THPVariable_Unpack(object);
}

} // namespace oo

#endif
