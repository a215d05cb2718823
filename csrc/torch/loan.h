/* loan.h - what a layer's masters were, and the loan itself: a layer's tensors in a slot of the
 * arena, taken from the engine and given back in one frame. */
#ifndef OO_LOAN_H
#define OO_LOAN_H

#include <torch/csrc/autograd/graph_task.h>

#include "handover.h"
#include "objects.h"

namespace oo {

using Cast = std::optional<at::ScalarType>; /* what autocast computes in */

inline const oo_handover *core;
/* Of Python, held for ever. */
inline PyObject *engine_type, *profiler_globals, *no_room_error, *offload_error;

inline bool is_profiled() { return find(profiler_globals, names._is_profiler_enabled) != Py_False; }

inline uint64_t version_of(const at::Tensor &tensor) {
    /* What was made in inference mode has no counter, and keeps having none where memory that was
     * not takes the place of its own: it is no inference tensor any more then. */
    return tensor.unsafeGetTensorImpl()->version_counter().enabled()
               ? static_cast<uint64_t>(tensor._version())
               : 0;
}

/* Whether autocast makes another tensor of it. */
inline bool is_cast(const at::Tensor &tensor, Cast dtype) {
    return dtype && tensor.defined() && tensor.is_floating_point() &&
           tensor.scalar_type() != at::kDouble && tensor.scalar_type() != *dtype;
}

inline at::Tensor cast(const at::Tensor &tensor, Cast dtype) {
    return is_cast(tensor, dtype) ? tensor.to(*dtype) : tensor;
}

/* ---- what a layer's masters were ---- */

struct Master {
    PyObject *name = nullptr;
    PyObject *tensor = nullptr; /* which the Masters hold, for us; nullptr: there is none */
    const void *where = nullptr;
    Sizes stride;
    int64_t numel = 0;
    at::ScalarType dtype = at::kFloat;

    /* Whether `tensor` lies there now, at the same place and of one layout. */
    bool is(PyObject *now) const {
        if (now == Py_None)
            now = nullptr;
        if (now != tensor || !now)
            return now == tensor;
        const at::Tensor &found = THPVariable_Unpack(now);
        return found.layout() == at::kStrided && found.const_data_ptr() == where &&
               found.strides() == at::IntArrayRef(stride) && found.numel() == numel &&
               found.scalar_type() == dtype;
    }

    bool is_trained() const { return tensor && THPVariable_Unpack(tensor).requires_grad(); }
};

/* What the Masters of Python noted: weight and bias. It counts only while the layer has those, and
 * holds nothing of Python. */
struct Known {
    int64_t serial = -1; /* of those Masters */
    std::array<Master, 2> rows;

    void read(PyObject *masters) {
        const Owned noted = get(masters, names._noted);
        TORCH_CHECK(PyList_Check(noted) && PyList_Size(noted) == 2);
        std::array<Master, 2> found;
        for (Py_ssize_t i = 0; i < 2; i++) {
            PyObject *row = PyList_GetItem(noted, i);
            Master &master = found[static_cast<size_t>(i)];
            master.name = PyTuple_GetItem(row, 0);
            PyObject *tensor = PyTuple_GetItem(row, 1);
            if (tensor == Py_None)
                continue;
            master.tensor = tensor;
            master.where = reinterpret_cast<const void *>(address(PyTuple_GetItem(row, 2)));
            PyObject *stride = PyTuple_GetItem(row, 3);
            for (Py_ssize_t d = 0; d < PyTuple_Size(stride); d++)
                master.stride.push_back(integer(PyTuple_GetItem(stride, d)));
            master.numel = integer(PyTuple_GetItem(row, 4));
            master.dtype = reinterpret_cast<THPDtype *>(PyTuple_GetItem(row, 5))->scalar_type;
        }
        rows = std::move(found);
        serial = integer(masters, names.serial);
    }

    /* Whether a layer computes with its masters. */
    bool are_there(PyObject *layer, PyObject *masters) {
        if (serial != integer(masters, names.serial))
            read(masters);
        const Owned parameters = get(layer, names.parameters);
        if (!PyDict_Check(parameters) || !rows[0].tensor)
            return false;
        for (const Master &row : rows)
            if (!row.is(find(parameters, row.name)))
                return false;
        return true;
    }
};

/* What a call computes with, whatever other threads do meanwhile. */
struct Found {
    Owned masters;
    int64_t serial; /* of those */
    at::Tensor weight, bias;
    const void *where; /* the weight lies */
    Cast dtype;
};

/* `version_of` all tensors of a Masters. */
inline uint64_t stamp_of(PyObject *masters) {
    const Owned present = get(masters, names.present);
    uint64_t stamp = 0;
    for (Py_ssize_t i = 0; i < PyTuple_Size(present); i++)
        stamp += version_of(THPVariable_Unpack(PyTuple_GetItem(present, i)));
    return stamp;
}

/* ---- the loan ---- */

struct Weights {
    at::Tensor weight, bias;
};

/* A `DeviceState`, of which one call or one node asks each thing once. */
struct Device {
    explicit Device(PyObject *layer)
        : state(get(layer, names.state)), engine(get(state, names.engine)),
          is_simulated(is_true(state, names.simulated)) {}

    /* Whether nothing stands before the engine. */
    bool is_plain() const { return reinterpret_cast<PyObject *>(Py_TYPE(engine)) == engine_type; }

    const Owned state, engine;
    const bool is_simulated;
    std::optional<uintptr_t> stream; /* that torch computes on: it sets it for a whole node */
};

/* Tell the engine the versions of what it has begun to copy. */
inline void stamp_fetched(PyObject *state, const oo_fetched &fetched) {
    if (!fetched.count)
        return;
    const Owned units = Owned(PyTuple_New(fetched.count));
    for (uint32_t i = 0; i < fetched.count; i++)
        PyTuple_SET_ITEM(units, i, Owned(PyLong_FromUnsignedLong(fetched.units[i])).release());
    ask(state, names.stamp_units, static_cast<PyObject *>(units));
}

inline uintptr_t stream_of(PyObject *state) {
    return address(Owned(PyObject_CallNoArgs(get(state, names.stream))));
}

/* `DeviceState.begin_use`; on a real device all but one in 29 ask for nothing but the stream. */
inline uintptr_t begin_use(const Device &device) {
    if (!device.is_simulated) {
        const Owned pace = get(device.state, names.pace);
        const int64_t uses = integer(pace, names.uses) + 1;
        if (uses < integer(pace, names.next_look)) {
            const Owned now = Owned(PyLong_FromLongLong(uses));
            if (PyObject_SetAttr(pace, names.uses, now) < 0)
                raise();
            return stream_of(device.state);
        }
    }
    return address(ask(device.state, names.begin_use));
}

/* The layer's tensors where they lie in a slot. */
inline Weights weights_at(PyObject *layer, uintptr_t slot) {
    const Owned views = get(layer, names.views);
    const Owned key = Owned(PyLong_FromUnsignedLongLong(slot));
    PyObject *known = find(views, key);
    Py_XINCREF(known);
    const Owned tensors =
        Owned(known ? known : PyObject_CallMethodOneArg(layer, names.view_at, key));
    return {tensor_in(PyTuple_GetItem(tensors, 0)), tensor_in(PyTuple_GetItem(tensors, 1))};
}

/* End a use. An exception that is set stays, unless the release itself fails. */
inline void release(const Device &device, const oo_use &use) {
    PyObject *kind, *value, *traceback;
    PyErr_Fetch(&kind, &value, &traceback);
    oo_fetched fetched;
    if (core->release(device.engine, use.ticket, *device.stream, &fetched) < 0) {
        Py_XDECREF(kind);
        Py_XDECREF(value);
        Py_XDECREF(traceback);
        raise();
    }
    stamp_fetched(device.state, fetched);
    PyErr_Restore(kind, value, traceback);
}

/* `Borrower.lend`: what takes also gives back. Nothing is returned where Python must take over;
 * then nothing is in use. `compute` runs without the GIL, with what autocast makes of the tensors:
 * in backward of the weight alone. */
template <typename Compute>
auto lend(PyObject *layer, Device &device, oo_request request, Cast dtype, const Compute &compute)
    -> std::optional<decltype(compute(Weights()))> {
    if (!device.is_plain())
        return {};
    device.stream = request.stream = begin_use(device);
    oo_use use;
    if (core->acquire(device.engine, &request, &use) < 0) {
        python_error error;
        error.persist();
        /* No room, which Python words; or another thread has moved the tensors. */
        if (PyErr_GivenExceptionMatches(error.type, no_room_error) ||
            (is_true(layer, names.former) &&
             PyErr_GivenExceptionMatches(error.type, offload_error)))
            return {};
        throw error;
    }
    std::optional<decltype(compute(Weights()))> result;
    try {
        stamp_fetched(device.state, use.fetched);
        if (!is_true(layer, names.moving)) {
            Weights weights = weights_at(layer, use.address);
            const pybind11::gil_scoped_release without;
            weights.weight = cast(weights.weight, dtype);
            if (request.kind != OO_BACKWARD)
                weights.bias = cast(weights.bias, dtype);
            result = compute(weights);
        }
    } catch (...) {
        release(device, use);
        throw;
    }
    release(device, use);
    return result;
}

} // namespace oo

#endif
