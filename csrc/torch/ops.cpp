/* ops.cpp - the loan of a frozen nn.Linear without a frame of Python: its call, and the node that
 * differentiates it.
 *
 * `oracle_offload.layers.loan` is the reference, and what runs wherever anything here is not as
 * usual: a call is handed over as a whole before anything of it has begun, and so is a backward.
 * What both read, they read of the same objects of Python: a layer keeps nothing here but what its
 * masters were. The engine is reached through the binding, so that it sees the same uses. */
#include <torch/csrc/Device.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/python_variable.h>

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/SavedTensorHooks.h>
#include <ATen/TracerMode.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/_unsafe_view.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <structmember.h>

#include <array>
#include <atomic>
#include <optional>
#include <vector>

#include "handover.h"

namespace {

using torch::autograd::Node;
using torch::autograd::variable_list;
using Cast = std::optional<at::ScalarType>; /* what autocast computes in */
using Sizes = std::vector<int64_t>;

const oo_handover *core;
/* Of Python, held for ever. */
PyObject *engine_type, *profiler_globals, *no_room_error, *offload_error, *differentiate;
std::atomic<int64_t> n_forward, n_backward; /* computed here */

/* ---- Python ---- */

/* Each attribute that is asked for, interned. */
#define NAMES(NAME)                                                                                \
    NAME(_is_profiler_enabled)                                                                     \
    NAME(_noted)                                                                                   \
    NAME(begin_forward)                                                                            \
    NAME(begin_use)                                                                                \
    NAME(backward_reads)                                                                           \
    NAME(backward_seconds)                                                                         \
    NAME(changed)                                                                                  \
    NAME(coded)                                                                                    \
    NAME(engine)                                                                                   \
    NAME(former)                                                                                   \
    NAME(forward_seconds)                                                                          \
    NAME(has_stale_codes)                                                                          \
    NAME(masters)                                                                                  \
    NAME(member)                                                                                   \
    NAME(moving)                                                                                   \
    NAME(needs_of_input)                                                                           \
    NAME(next_look)                                                                                \
    NAME(pace)                                                                                     \
    NAME(parameters)                                                                               \
    NAME(present)                                                                                  \
    NAME(serial)                                                                                   \
    NAME(simulated)                                                                                \
    NAME(stamp_units)                                                                              \
    NAME(state)                                                                                    \
    NAME(stream)                                                                                   \
    NAME(structure)                                                                                \
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
} names;

/* An exception of Python as one of C++, which may cross threads. */
[[noreturn]] void raise() {
    python_error error;
    error.persist();
    throw error;
}

/* A reference of its own; the GIL is held wherever it ends. */
class Owned {
  public:
    /* What a call has returned: nullptr is its exception. */
    explicit Owned(PyObject *returned) : object(returned) {
        if (!object)
            raise();
    }
    Owned(Owned &&other) noexcept : object(std::exchange(other.object, nullptr)) {}
    Owned(const Owned &) = delete;
    ~Owned() { Py_XDECREF(object); }
    operator PyObject *() const { return object; }
    PyObject *release() { return std::exchange(object, nullptr); }

  private:
    PyObject *object;
};

Owned get(PyObject *object, PyObject *name) { return Owned(PyObject_GetAttr(object, name)); }

bool is_true(PyObject *value) {
    const int truth = value == Py_True ? 1 : PyObject_IsTrue(value);
    if (truth < 0)
        raise();
    return truth != 0;
}

bool is_true(PyObject *object, PyObject *name) { return is_true(get(object, name)); }

int64_t integer(PyObject *number) {
    const int64_t value = PyLong_AsLongLong(number);
    if (value == -1 && PyErr_Occurred())
        raise();
    return value;
}

int64_t integer(PyObject *object, PyObject *name) { return integer(get(object, name)); }

uint64_t address(PyObject *number) {
    const uint64_t value = PyLong_AsUnsignedLongLong(number);
    if (value == UINT64_MAX && PyErr_Occurred())
        raise();
    return value;
}

double number(PyObject *object) {
    const double value = PyFloat_AsDouble(object);
    if (value == -1 && PyErr_Occurred())
        raise();
    return value;
}

Owned tuple_of(const Sizes &values) {
    Owned tuple(PyTuple_New(static_cast<Py_ssize_t>(values.size())));
    for (size_t i = 0; i < values.size(); i++)
        PyTuple_SET_ITEM(tuple, static_cast<Py_ssize_t>(i),
                         Owned(PyLong_FromLongLong(values[i])).release());
    return tuple;
}

bool is_profiled() {
    return PyDict_GetItemWithError(profiler_globals, names._is_profiler_enabled) != Py_False;
}

uint64_t version_of(const at::Tensor &tensor) {
    return tensor.is_inference() ? 0 : static_cast<uint64_t>(tensor._version());
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
};

/* `Linear(device)`: computes as `layer(x)` does, when it is called with both. It holds nothing of
 * Python: what is noted of masters counts only while the layer has those. */
struct Linear {
    PyObject_HEAD vectorcallfunc call;
    c10::Device device;
    int64_t serial; /* of the Masters that what follows is of */
    std::array<Master, 2> rows;
};

/* Take what the Masters noted. */
void read_masters(Linear &self, PyObject *masters) {
    const Owned noted = get(masters, names._noted);
    TORCH_CHECK(PyList_Check(noted) && PyList_Size(noted) == 2);
    std::array<Master, 2> rows;
    for (Py_ssize_t i = 0; i < 2; i++) {
        PyObject *row = PyList_GetItem(noted, i);
        Master &master = rows[static_cast<size_t>(i)];
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
    self.rows = std::move(rows);
    self.serial = integer(masters, names.serial);
}

/* Whether a layer computes with its masters, and none of them is trained. */
bool is_frozen(Linear &self, PyObject *layer, PyObject *masters) {
    if (self.serial != integer(masters, names.serial))
        read_masters(self, masters);
    const Owned parameters = get(layer, names.parameters);
    if (!PyDict_Check(parameters) || !self.rows[0].tensor)
        return false;
    for (const Master &row : self.rows) {
        if (!row.is(PyDict_GetItemWithError(parameters, row.name)))
            return false;
        if (row.tensor && THPVariable_Unpack(row.tensor).requires_grad())
            return false;
    }
    return true;
}

/* `version_of` all tensors of a Masters. */
uint64_t stamp_of(PyObject *masters) {
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

/* Tell the engine the versions of what it has begun to copy. */
void stamp_fetched(PyObject *state, const oo_fetched &fetched) {
    if (!fetched.count)
        return;
    const Owned units = Owned(PyTuple_New(fetched.count));
    for (uint32_t i = 0; i < fetched.count; i++)
        PyTuple_SET_ITEM(units, i, Owned(PyLong_FromUnsignedLong(fetched.units[i])).release());
    Owned(PyObject_CallMethodOneArg(state, names.stamp_units, units));
}

/* `DeviceState.begin_use`; on a real device all but one in 29 ask for nothing but the stream. */
uintptr_t begin_use(PyObject *state) {
    if (!is_true(state, names.simulated)) {
        const Owned pace = get(state, names.pace);
        const int64_t uses = integer(pace, names.uses) + 1;
        if (uses < integer(pace, names.next_look)) {
            const Owned now = Owned(PyLong_FromLongLong(uses));
            if (PyObject_SetAttr(pace, names.uses, now) < 0)
                raise();
            const Owned stream = get(state, names.stream);
            return address(Owned(PyObject_CallNoArgs(stream)));
        }
    }
    return address(Owned(PyObject_CallMethodNoArgs(state, names.begin_use)));
}

/* The layer's tensors where they lie in a slot. */
Weights weights_at(PyObject *layer, uintptr_t slot) {
    const Owned views = get(layer, names.views);
    const Owned key = Owned(PyLong_FromUnsignedLongLong(slot));
    PyObject *known = PyDict_GetItemWithError(views, key);
    Py_XINCREF(known);
    if (!known && PyErr_Occurred())
        raise();
    const Owned tensors =
        Owned(known ? known : PyObject_CallMethodOneArg(layer, names.view_at, key));
    PyObject *weight = PyTuple_GetItem(tensors, 0);
    PyObject *bias = PyTuple_GetItem(tensors, 1);
    return {THPVariable_Unpack(weight), bias == Py_None ? at::Tensor() : THPVariable_Unpack(bias)};
}

at::Tensor cast(const at::Tensor &tensor, Cast dtype) {
    const bool casts = dtype && tensor.defined() && tensor.is_floating_point() &&
                       tensor.scalar_type() != at::kDouble;
    return casts && tensor.scalar_type() != *dtype ? tensor.to(*dtype) : tensor;
}

/* End a use. An exception that is set stays, unless the release itself fails. */
void release(PyObject *engine, PyObject *state, const oo_use &use, uintptr_t stream) {
    PyObject *kind, *value, *traceback;
    PyErr_Fetch(&kind, &value, &traceback);
    oo_fetched fetched;
    if (core->release(engine, use.ticket, stream, &fetched) < 0) {
        Py_XDECREF(kind);
        Py_XDECREF(value);
        Py_XDECREF(traceback);
        raise();
    }
    stamp_fetched(state, fetched);
    PyErr_Restore(kind, value, traceback);
}

/* `Borrower.lend`: what takes also gives back. An undefined tensor where Python must take over;
 * then nothing is in use. `compute` runs without the GIL. */
template <typename Compute>
at::Tensor lend(PyObject *layer, PyObject *state, oo_request request, const Compute &compute) {
    const Owned engine = get(state, names.engine);
    if (reinterpret_cast<PyObject *>(Py_TYPE(engine)) != engine_type)
        return {}; /* something stands before it */
    request.stream = begin_use(state);
    oo_use use;
    if (core->acquire(engine, &request, &use) < 0) {
        python_error error;
        error.persist();
        /* No room, which Python words; or another thread has moved the tensors. */
        if (PyErr_GivenExceptionMatches(error.type, no_room_error) ||
            (is_true(layer, names.former) &&
             PyErr_GivenExceptionMatches(error.type, offload_error)))
            return {};
        throw error;
    }
    at::Tensor result;
    try {
        stamp_fetched(state, use.fetched);
        if (!is_true(layer, names.moving)) {
            const Weights weights = weights_at(layer, use.address);
            pybind11::gil_scoped_release without;
            result = compute(weights);
        }
    } catch (...) {
        release(engine, state, use, request.stream);
        throw;
    }
    release(engine, state, use, request.stream);
    return result;
}

/* ---- backward ---- */

/* Whether a transform of torch.func is active. */
bool is_transformed() {
    const c10::DispatchKeySet keys = c10::impl::tls_local_dispatch_key_set().included_;
    return keys.has(c10::DispatchKey::FuncTorchDynamicLayerFrontMode) ||
           keys.has(c10::DispatchKey::FuncTorchDynamicLayerBackMode);
}

/* What forward found, and backward asks for again. */
struct Origin {
    PyObject *layer, *masters;
    Cast dtype;
    int64_t task;
    uint64_t version;    /* of the weight */
    const void *where;   /* its master */
    Sizes shape, stride; /* of the input */
};

struct ManagedLinearBackward : Node {
    ManagedLinearBackward(torch::autograd::edge_list &&edges, Origin &&found)
        : Node(std::move(edges)), origin(std::move(found)) {
        Py_INCREF(origin.layer);
        Py_INCREF(origin.masters);
    }
    ManagedLinearBackward(const ManagedLinearBackward &) = delete;
    ~ManagedLinearBackward() override {
        if (!Py_IsInitialized())
            return;
        const pybind11::gil_scoped_acquire gil;
        Py_DECREF(origin.layer);
        Py_DECREF(origin.masters);
    }

    std::string name() const override { return "ManagedLinearBackward"; }
    variable_list apply(variable_list &&gradients) override;

    const Origin origin;
};

/* Whether what the engine has are codes of weights that were written since. */
bool was_coded_written(const Origin &origin) {
    if (!is_true(origin.layer, names.coded))
        return false;
    const Owned reads = get(origin.layer, names.backward_reads);
    return is_true(
        Owned(PyObject_CallMethodObjArgs(origin.layer, names.was_coded_written, origin.masters,
                                         static_cast<PyObject *>(reads), nullptr)));
}

/* Whether the layer is as forward left it: what `Loan.backward` and `lend_backward` look at. Where
 * its tensors have moved to the device, they lie elsewhere. */
bool is_unchanged(const Origin &origin) {
    if (is_profiled() || was_coded_written(origin) || integer(origin.layer, names.member) < 0)
        return false;
    const Owned parameters = get(origin.layer, names.parameters);
    PyObject *weight =
        PyDict_Check(parameters) ? PyDict_GetItemWithError(parameters, names.weight) : nullptr;
    if (!weight || !THPVariable_Check(weight))
        return false;
    const at::Tensor &master = THPVariable_Unpack(weight);
    return master.const_data_ptr() == origin.where && version_of(master) == origin.version;
}

/* Whether ``at::matmul`` multiplies an input of three or more dimensions as one matrix. */
bool folds(const Sizes &shape, const Sizes &stride) {
    for (size_t i = 0; i + 2 < shape.size(); i++)
        if (stride[i] != stride[i + 1] * shape[i + 1])
            return false;
    return true;
}

/* Whether a tensor of this geometry is contiguous, as torch counts it. */
bool is_contiguous(const Sizes &shape, const Sizes &stride) {
    int64_t expected = 1;
    bool contiguous = true;
    for (size_t i = shape.size(); i-- > 0;) {
        if (shape[i] == 0)
            return true;
        contiguous &= shape[i] == 1 || stride[i] == expected;
        expected *= shape[i];
    }
    return contiguous;
}

int64_t rows_of(const Sizes &shape) {
    int64_t rows = 1;
    for (size_t i = 0; i + 1 < shape.size(); i++)
        rows *= shape[i];
    return rows;
}

/* Whether `input_gradient` asks torch what a folded view would look like: left to Python. */
bool is_odd(const Sizes &shape, const Sizes &stride) {
    return shape.size() != 2 && (rows_of(shape) == 1 || shape.back() == 1 || stride.back() != 1);
}

/* `layers.linear.input_gradient`, of a geometry that is not odd. */
at::Tensor input_gradient(const at::Tensor &gradient, const at::Tensor &weight, const Sizes &shape,
                          const Sizes &stride) {
    if (shape.size() == 2) {
        if (stride[0] == 1 && stride[1] == shape[0])
            return at::mm(weight.t(), gradient.t()).t();
        return at::mm(gradient, weight);
    }
    const int64_t rows = rows_of(shape);
    if (shape.size() > 2 && !is_contiguous(shape, stride) && !folds(shape, stride)) {
        const int64_t within = shape[shape.size() - 2], batch = rows / within;
        const at::Tensor each = weight.expand({batch, weight.size(0), weight.size(1)});
        return at::bmm(gradient.reshape({batch, within, weight.size(0)}), each).reshape(shape);
    }
    return at::mm(gradient.reshape({rows, weight.size(0)}), weight).reshape(shape);
}

/* By the loan here; undefined where Python must take over. */
at::Tensor differentiate_here(const Origin &origin, const at::Tensor &gradient) {
    if (at::GradMode::is_enabled() || is_transformed() || is_odd(origin.shape, origin.stride) ||
        rows_of(origin.shape) == 0 || !is_unchanged(origin))
        return {};
    const Owned state = get(origin.layer, names.state);
    if (PyObject_SetAttr(state, names.turned, Py_True) < 0)
        raise();
    oo_request request{};
    request.member = static_cast<uint32_t>(integer(origin.layer, names.member));
    request.kind = OO_BACKWARD;
    request.task = torch::autograd::get_current_graph_task_id();
    request.stamp = stamp_of(origin.masters);
    if (is_true(state, names.simulated)) {
        const Owned wrapped(THPVariable_Wrap(gradient));
        const Owned needs = get(origin.masters, names.needs_of_input);
        request.seconds = number(Owned(PyObject_CallMethodObjArgs(
            origin.layer, names.backward_seconds, static_cast<PyObject *>(wrapped),
            static_cast<PyObject *>(needs), nullptr)));
    }
    return lend(origin.layer, state, request, [&](const Weights &weights) {
        return input_gradient(gradient, cast(weights.weight, origin.dtype), origin.shape,
                              origin.stride);
    });
}

/* By `Loan.backward`, which refuses what has to be refused. */
at::Tensor differentiate_there(const Origin &origin, const at::Tensor &gradient) {
    PyObject *dtype =
        origin.dtype ? reinterpret_cast<PyObject *>(torch::getTHPDtype(*origin.dtype)) : Py_None;
    const Owned shape = tuple_of(origin.shape), stride = tuple_of(origin.stride);
    const Owned arguments(Py_BuildValue(
        "(OOLOKOON)", origin.layer, dtype, static_cast<long long>(origin.task), origin.masters,
        static_cast<unsigned long long>(origin.version), static_cast<PyObject *>(shape),
        static_cast<PyObject *>(stride), THPVariable_Wrap(gradient)));
    const Owned found(PyObject_Call(differentiate, arguments, nullptr));
    return THPVariable_Unpack(found);
}

variable_list ManagedLinearBackward::apply(variable_list &&gradients) {
    const pybind11::gil_scoped_acquire gil;
    at::Tensor gradient = gradients[0].defined() ? gradients[0] : input_metadata(0).zeros_like();
    try {
        at::Tensor found = differentiate_here(origin, gradient);
        if (found.defined())
            n_backward++;
        else
            found = differentiate_there(origin, gradient);
        return {found};
    } catch (python_error &error) {
        error.persist(); /* its thread may not have the exception for long */
        throw;
    }
}

/* A pointer to a node as this torch counts it. */
template <typename Pointer, typename Made> Pointer pointer_to(Made *made) {
    if constexpr (std::is_same_v<Pointer, std::shared_ptr<Node>>)
        return Pointer(made, [](auto *node) { deleteNode(node); });
    else
        return Pointer::unsafe_steal_from_new(made);
}

using Pointer = decltype(torch::autograd::Edge::function);

/* ---- forward ---- */

/* Whether nobody sees more of a call than its operators: what `Layer.ready` looks at. */
bool is_plain(PyObject *layer) {
    return !is_transformed() && !at::tracer::impl::is_dispatch_enabled() &&
           !at::impl::torch_function_mode_enabled() &&
           !c10::impl::TorchDispatchModeTLS::get_mode(c10::impl::TorchDispatchModeKey::PROXY) &&
           !is_profiled() && !is_true(get(layer, names.structure), names.changed) &&
           !(is_true(layer, names.coded) &&
             is_true(Owned(PyObject_CallMethodNoArgs(layer, names.has_stale_codes))));
}

/* Whether the input is an ordinary one, on the device. */
bool is_usual(const at::Tensor &x, const c10::Device &device) {
    return x.device().type() == device.type() && x.layout() == at::kStrided && !x.is_nested() &&
           !x._fw_grad(0).defined();
}

/* Whether autocast keeps the cast of this leaf for all its uses in the region. */
bool is_cast_once(const at::Tensor &x) {
    return x.requires_grad() && x.is_leaf() && x.scalar_type() == at::kFloat && !x.is_view() &&
           at::GradMode::is_enabled() && at::autocast::is_autocast_cache_enabled() &&
           at::SavedTensorDefaultHooks::is_enabled();
}

/* ``F.linear`` with a weight that requires no grad. torch forbids in-place changes of a view that a
 * custom function returns. */
at::Tensor multiply(const at::Tensor &x, const Weights &weights, Cast dtype) {
    const at::Tensor bias = cast(weights.bias, dtype);
    at::Tensor y = at::linear(x, cast(weights.weight, dtype),
                              bias.defined() ? std::optional<at::Tensor>(bias) : std::nullopt);
    return y.is_view() ? at::_unsafe_view(y, y.sizes()) : y;
}

/* What a call computes with, whatever other threads do meanwhile. */
struct Frozen {
    Owned masters, weight;
    const void *where; /* the weight lies */
};

/* What is asked of the engine for a forward now. */
oo_request forward_request(PyObject *layer, PyObject *state, PyObject *masters,
                           const at::Tensor &x) {
    const int64_t task = torch::autograd::get_current_graph_task_id();
    oo_request request{};
    request.member = static_cast<uint32_t>(integer(layer, names.member));
    request.kind = task == -1 ? OO_FORWARD : OO_RECOMPUTE;
    request.stamp = stamp_of(masters);
    request.task = task;
    if (is_true(state, names.simulated)) {
        const Owned wrapped(THPVariable_Wrap(x));
        request.seconds =
            number(Owned(PyObject_CallMethodOneArg(layer, names.forward_seconds, wrapped)));
    }
    return request;
}

/* Compute below a node of the graph, as `Loan.forward` does. */
at::Tensor record(const Frozen &found, PyObject *layer, const at::Tensor &x, Cast dtype) {
    const at::AutoGradMode off(false);
    const Owned state = get(layer, names.state);
    const oo_request request = forward_request(layer, state, found.masters, x);
    at::Tensor y = lend(layer, state, request,
                        [&](const Weights &weights) { return multiply(x, weights, dtype); });
    if (!y.defined())
        return y;
    Origin origin{layer,
                  found.masters,
                  dtype,
                  request.task,
                  version_of(THPVariable_Unpack(found.weight)),
                  found.where,
                  x.sizes().vec(),
                  x.strides().vec()};
    torch::autograd::set_history(
        y, pointer_to<Pointer>(new ManagedLinearBackward(torch::autograd::collect_next_edges(x),
                                                         std::move(origin))));
    if (request.task == -1 && is_true(state, names.turned))
        Owned(PyObject_CallMethodNoArgs(state, names.begin_forward));
    return y;
}

/* Compute as `Layer.lend_unrecorded` does. */
at::Tensor compute(PyObject *layer, PyObject *masters, const at::Tensor &x, Cast dtype) {
    const Owned state = get(layer, names.state);
    return lend(layer, state, forward_request(layer, state, masters, x),
                [&](const Weights &weights) { return multiply(x, weights, dtype); });
}

/* `Layer.__call__`; undefined where Python must take over. */
at::Tensor forward(Linear &self, PyObject *layer, at::Tensor x) {
    Owned masters = get(layer, names.masters);
    if (!is_usual(x, self.device) || !is_plain(layer) || !is_frozen(self, layer, masters))
        return {};
    const Master &weight = self.rows[0];
    const Frozen found{std::move(masters), Owned(Py_NewRef(weight.tensor)), weight.where};
    Cast dtype;
    if (at::autocast::is_autocast_enabled(self.device.type())) {
        dtype = at::autocast::get_autocast_dtype(self.device.type());
        if (x.scalar_type() != *dtype && is_cast_once(x))
            return {};
        const pybind11::gil_scoped_release without;
        x = cast(x, dtype);
    }
    const at::Tensor y = at::GradMode::is_enabled() && x.requires_grad()
                             ? record(found, layer, x, dtype)
                             : compute(layer, found.masters, x, dtype);
    n_forward += y.defined();
    return y;
}

/* ---- the types and functions of the module ---- */

Linear *linear_of(PyObject *object) { return reinterpret_cast<Linear *>(object); }

PyObject *linear_call(PyObject *object, PyObject *const *arguments, size_t count,
                      PyObject *keywords) {
    HANDLE_TH_ERRORS
    if (PyVectorcall_NARGS(count) != 2 || keywords) {
        PyErr_SetString(PyExc_TypeError, "a layer and its input are needed");
        return nullptr;
    }
    PyObject *layer = arguments[0], *x = arguments[1];
    if (THPVariable_CheckExact(x)) {
        at::Tensor y = forward(*linear_of(object), layer, THPVariable_Unpack(x));
        if (y.defined())
            return THPVariable_Wrap(std::move(y));
    }
    return PyObject_CallOneArg(layer, x);
    END_HANDLE_TH_ERRORS
}

PyObject *linear_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
    HANDLE_TH_ERRORS
    PyObject *device;
    if (keywords || !PyArg_ParseTuple(arguments, "O", &device))
        return nullptr;
    TORCH_CHECK_TYPE(THPDevice_Check(device), "a torch.device is needed");
    Linear *self = linear_of(Owned(type->tp_alloc(type, 0)).release());
    self->call = linear_call;
    self->serial = -1;
    new (&self->device) c10::Device(reinterpret_cast<THPDevice *>(device)->device);
    new (&self->rows) std::array<Master, 2>();
    return reinterpret_cast<PyObject *>(self);
    END_HANDLE_TH_ERRORS
}

void linear_dealloc(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    linear_of(object)->rows.~array();
    type->tp_free(object);
    Py_DECREF(type);
}

PyMemberDef linear_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, sizeof(PyObject), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

char linear_doc[] =
    "Linear(device): called with a layer and its input, computes what the layer does.";
PyType_Slot linear_slots[] = {
    {Py_tp_new, reinterpret_cast<void *>(linear_new)},
    {Py_tp_call, reinterpret_cast<void *>(PyVectorcall_Call)},
    {Py_tp_dealloc, reinterpret_cast<void *>(linear_dealloc)},
    {Py_tp_members, linear_members},
    {Py_tp_doc, linear_doc},
    {0, nullptr},
};
PyType_Spec linear_spec = {"oracle_offload._ops.Linear", sizeof(Linear), 0,
                           Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL, linear_slots};

/* Nodes show themselves to Python by this type; nobody makes one there. */
struct Nobody {
    Node *operator()(PyObject *) const { throw torch::TypeError("a graph alone makes this"); }
};
PyTypeObject node_type;

PyObject *counts(PyObject *, PyObject *) {
    return Py_BuildValue("(LL)", static_cast<long long>(n_forward),
                         static_cast<long long>(n_backward));
}

PyMethodDef functions[] = {
    {"counts", counts, METH_NOARGS, "counts()\n--\n\nForwards and backwards computed here."},
    {nullptr, nullptr, 0, nullptr},
};

PyObject *attribute(const char *module, const char *name) {
    return get(Owned(PyImport_ImportModule(module)), Owned(PyUnicode_FromString(name))).release();
}

/* Take what is asked of Python for as long as the process lives. */
void find_all() {
    core = static_cast<const oo_handover *>(PyCapsule_GetPointer(
        Owned(attribute("oracle_offload._core", "handover")), OO_HANDOVER_NAME));
    if (!core)
        raise();
    TORCH_CHECK(core->layout == OO_HANDOVER_LAYOUT, "made for another build of oracle_offload");
#define INTERN(name) names.name = Owned(PyUnicode_InternFromString(#name)).release();
    NAMES(INTERN)
#undef INTERN
    engine_type = attribute("oracle_offload._core", "Engine");
    offload_error = attribute("oracle_offload.errors", "OffloadError");
    no_room_error = attribute("oracle_offload.errors", "NoRoomError");
    differentiate = attribute("oracle_offload.layers.linear", "differentiate");
    profiler_globals = attribute("torch.autograd.profiler", "__dict__");
}

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    "oracle_offload._ops",
    "Loans without a frame of Python; see csrc/torch/ops.cpp.",
    -1,
    functions,
    nullptr,
    nullptr,
    nullptr,
    nullptr,
};

} // namespace

PyMODINIT_FUNC PyInit__ops(void) {
    HANDLE_TH_ERRORS
    find_all();
    torch::autograd::registerCppFunction(typeid(ManagedLinearBackward),
                                         torch::autograd::createForwardFunctionPyTypeObject<Nobody>(
                                             node_type, "ManagedLinearBackward"));
    Owned module(PyModule_Create(&definition));
    const Owned linear(PyType_FromSpec(&linear_spec));
    if (PyModule_AddObjectRef(module, "Linear", linear) < 0)
        return nullptr;
    return module.release();
    END_HANDLE_TH_ERRORS
}
