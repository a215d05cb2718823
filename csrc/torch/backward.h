/* backward.h - the node that differentiates a layer: what forward found, asked for again. */
#ifndef OO_BACKWARD_H
#define OO_BACKWARD_H

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <ATen/ops/empty_strided.h>

#include <atomic>

#include "loan.h"

namespace oo {

using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

/* Of Python, held for ever. */
inline PyObject *differentiate, *note_trainable_there, *gradients_globals;
inline std::atomic<int64_t> n_forward, n_backward; /* computed here */

/* Whether a transform of torch.func is active. */
inline bool is_transformed() {
    const c10::DispatchKeySet keys = c10::impl::tls_local_dispatch_key_set().included_;
    return keys.has(c10::DispatchKey::FuncTorchDynamicLayerFrontMode) ||
           keys.has(c10::DispatchKey::FuncTorchDynamicLayerBackMode);
}

/* `gradients.note_trainable`, which Python does once for each graph task. */
inline void note_trainable(PyObject *state, int64_t task) {
    if (task == -1)
        return;
    const Owned tasks = get(state, names.tasks_with_gradients);
    const Owned number(PyLong_FromLongLong(task));
    const int known = PySet_Contains(tasks, number);
    if (known < 0)
        raise();
    if (!known)
        Owned(PyObject_CallFunctionObjArgs(note_trainable_there, state,
                                           static_cast<PyObject *>(number), nullptr));
}

/* Gradients of input, weight and bias, and whether they are wanted. */
using Gradients = std::array<at::Tensor, 3>;
using Needs = std::array<bool, 3>;

/* What forward found. */
struct Origin {
    PyObject *layer, *masters;
    Cast dtype;
    int64_t task;
    uint64_t version;             /* of the weight */
    const void *where;            /* its master */
    Sizes shape, stride;          /* of the input */
    std::array<bool, 2> trains;   /* weight and bias */
    std::array<bool, 2> stand_in; /* what takes their gradients: it brings them to the host */

    bool trains_any() const { return trains[0] || trains[1]; }
    bool was_coded_written() const;
    bool is_unchanged() const;

    /* `Layer.lend_backward`; nothing where Python must take over. */
    template <typename Compute>
    auto lend_again(Device &device, const at::Tensor &gradient, const Needs &needs,
                    const Compute &compute) const -> std::optional<decltype(compute(Weights()))>;
};

/* The input that forward kept, taken at most once: a checkpoint computes it again. */
class Saved {
  public:
    explicit Saved(const SavedVariable &found) : variable(&found) {}
    explicit Saved(at::Tensor found) : input(std::move(found)) {}
    const at::Tensor &get() {
        if (!input.defined())
            input = variable->unpack();
        return input;
    }

  private:
    const SavedVariable *variable = nullptr;
    at::Tensor input;
};

/* `Saved.get` for Python, for as long as one backward takes. */
class SavedForPython {
  public:
    explicit SavedForPython(Saved &saved)
        : capsule(PyCapsule_New(&saved, "saved", nullptr)),
          take(PyCFunction_New(&method, capsule)) {}
    ~SavedForPython() { PyCapsule_SetName(capsule, "gone"); }
    operator PyObject *() const { return take; }

  private:
    static PyObject *call(PyObject *capsule, PyObject *) {
        HANDLE_TH_ERRORS
        auto *saved = static_cast<Saved *>(PyCapsule_GetPointer(capsule, "saved"));
        return saved ? THPVariable_Wrap(saved->get()) : nullptr;
        END_HANDLE_TH_ERRORS
    }
    static inline PyMethodDef method = {"saved", call, METH_NOARGS, nullptr};
    const Owned capsule, take;
};

class ManagedBackward : public Node {
  public:
    /* `saved` is undefined where no weight is trained. */
    ManagedBackward(torch::autograd::edge_list &&edges, Origin &&found, const at::Tensor &saved)
        : Node(std::move(edges)), origin(std::move(found)), input(saved, false) {
        Py_INCREF(origin.layer);
        Py_INCREF(origin.masters);
    }
    ManagedBackward(const ManagedBackward &) = delete;
    ~ManagedBackward() override {
        if (!Py_IsInitialized())
            return;
        const pybind11::gil_scoped_acquire gil;
        Py_DECREF(origin.layer);
        Py_DECREF(origin.masters);
    }

    variable_list apply(variable_list &&gradients) override;
    void release_variables() override {
        if (!origin.trains[0])
            return;
        const pybind11::gil_scoped_acquire gil; /* protects it, as in `apply` */
        input.reset_data();
    }

    const Origin origin;

  protected:
    /* The kind's `derivative`; false where Python must take over, before anything was computed. */
    virtual bool derive(Device &device, const at::Tensor &gradient, const Needs &needs,
                        Saved &saved, Gradients &found) const = 0;
    /* What its `record` puts into ``ctx``, as a dict. */
    virtual Owned kept() const = 0;

  private:
    Needs needs() const;
    bool differentiate_here(Device &device, const at::Tensor &gradient, Saved &saved,
                            Gradients &found) const;
    Gradients differentiate_there(const at::Tensor &gradient, Saved &saved) const;
    void bring_to_host(Device &device, Gradients &found, bool here) const;

    SavedVariable input;
};

/* Whether what the engine has are codes of weights that were written since. */
inline bool Origin::was_coded_written() const {
    if (!is_true(layer, names.coded))
        return false;
    const Owned reads = get(layer, names.backward_reads);
    return is_true(ask(layer, names.was_coded_written, masters, static_cast<PyObject *>(reads)));
}

/* Whether the weight is as forward left it: what `check_unchanged` looks at. Where it has moved to
 * the device, it lies elsewhere. */
inline bool Origin::is_unchanged() const {
    if (was_coded_written())
        return false;
    const Owned parameters = get(layer, names.parameters);
    PyObject *weight = PyDict_Check(parameters) ? find(parameters, names.weight) : nullptr;
    if (!weight || !THPVariable_Check(weight))
        return false;
    const at::Tensor &master = THPVariable_Unpack(weight);
    return master.const_data_ptr() == where && version_of(master) == version;
}

template <typename Compute>
auto Origin::lend_again(Device &device, const at::Tensor &gradient, const Needs &needs,
                        const Compute &compute) const
    -> std::optional<decltype(compute(Weights()))> {
    if (!is_unchanged())
        return {};
    oo_request request{};
    request.member = static_cast<uint32_t>(integer(layer, names.member));
    request.kind = OO_BACKWARD;
    request.task = torch::autograd::get_current_graph_task_id();
    request.stamp = stamp_of(get(layer, names.masters));
    if (device.is_simulated) {
        const Owned wrapped(THPVariable_Wrap(gradient));
        const Owned wanted = tuple_of(Flags(needs.begin(), needs.end()));
        request.seconds =
            number(ask(layer, names.backward_seconds, static_cast<PyObject *>(wrapped),
                       static_cast<PyObject *>(wanted)));
    }
    return lend(layer, device, request, dtype, compute);
}

/* As Python counts them: by what needed a gradient in forward. */
inline Needs ManagedBackward::needs() const {
    return {next_edge(0).is_valid(), origin.trains[0], origin.trains[1]};
}

/* `Gradients.to_host` of one that is too small for locked memory of its own. */
inline at::Tensor download(PyObject *engine, const at::Tensor &gradient, uintptr_t stream) {
    const at::Tensor dense =
        gradient.is_non_overlapping_and_dense() ? gradient : gradient.contiguous();
    at::Tensor host =
        at::empty_strided(dense.sizes(), dense.strides(), dense.options().device(at::kCPU));
    if (dense.nbytes() && core->download(engine, host.mutable_data_ptr(),
                                         reinterpret_cast<uintptr_t>(dense.const_data_ptr()),
                                         dense.nbytes(), stream) < 0)
        raise();
    return host;
}

/* `Gradients.to_host`. */
inline at::Tensor to_host(PyObject *layer, Device &device, const at::Tensor &gradient) {
    if (!device.is_plain() || static_cast<int64_t>(gradient.nbytes()) >=
                                  integer(find(gradients_globals, names.LEAST_BYTES))) {
        const Owned gradients = get(get(layer, names.attachment), names.gradients);
        const Owned wrapped(THPVariable_Wrap(gradient));
        return THPVariable_Unpack(ask(gradients, names.to_host, static_cast<PyObject *>(wrapped)));
    }
    if (!device.stream)
        device.stream = stream_of(device.state);
    if (device.is_simulated) {
        const Owned stream(PyLong_FromUnsignedLongLong(*device.stream));
        ask(get(device.state, names.time), names.flush, static_cast<PyObject *>(stream));
    }
    return download(device.engine, gradient, *device.stream);
}

/* Where the masters lie, their gradients go. Without autocast Python has brought its own there. */
inline void ManagedBackward::bring_to_host(Device &device, Gradients &found, bool here) const {
    for (size_t i = 0; i < 2; i++)
        if (found[i + 1].defined() && !origin.stand_in[i] && (here || origin.dtype))
            found[i + 1] = to_host(origin.layer, device, found[i + 1]);
}

/* By the loan here; false where Python must take over. */
inline bool ManagedBackward::differentiate_here(Device &device, const at::Tensor &gradient,
                                                Saved &saved, Gradients &found) const {
    if (at::GradMode::is_enabled() || is_transformed() || is_profiled() ||
        integer(origin.layer, names.member) < 0)
        return false;
    if (PyObject_SetAttr(device.state, names.turned, Py_True) < 0)
        raise();
    if (!derive(device, gradient, needs(), saved, found))
        return false;
    if (origin.trains_any() && origin.task == -1)
        note_trainable(device.state, torch::autograd::get_current_graph_task_id());
    return true;
}

/* By `Loan.backward`, which refuses what has to be refused. */
inline Gradients ManagedBackward::differentiate_there(const at::Tensor &gradient,
                                                      Saved &saved) const {
    PyObject *dtype =
        origin.dtype ? reinterpret_cast<PyObject *>(torch::getTHPDtype(*origin.dtype)) : Py_None;
    const Needs wanted = needs();
    Flags flags = {wanted[0], false, false};
    if (origin.trains_any())
        flags.insert(flags.end(), {wanted[1], wanted[2]});
    const SavedForPython take(saved);
    const Owned asked = tuple_of(flags), ctx = kept();
    const Owned arguments(Py_BuildValue(
        "((OOLOK)OOON)", origin.layer, dtype, static_cast<long long>(origin.task), origin.masters,
        static_cast<unsigned long long>(origin.version), static_cast<PyObject *>(asked),
        static_cast<PyObject *>(ctx), static_cast<PyObject *>(take), THPVariable_Wrap(gradient)));
    const Owned found(PyObject_Call(differentiate, arguments, nullptr));
    Gradients gradients;
    for (size_t i = 0; i < 3; i++)
        if (wanted[i])
            gradients[i] =
                tensor_in(PyTuple_GetItem(found, static_cast<Py_ssize_t>(i ? i + 2 : 0)));
    return gradients;
}

inline variable_list ManagedBackward::apply(variable_list &&gradients) {
    const pybind11::gil_scoped_acquire gil;
    const at::Tensor gradient =
        gradients[0].defined() ? gradients[0] : input_metadata(0).zeros_like();
    try {
        Device device(origin.layer);
        Saved saved(input);
        Gradients found;
        const bool here = differentiate_here(device, gradient, saved, found);
        if (!here)
            found = differentiate_there(gradient, saved);
        n_backward += here;
        if (origin.trains_any())
            bring_to_host(device, found, here);
        variable_list result = {std::move(found[0])};
        for (size_t i = 0; i < 2; i++)
            if (origin.trains[i])
                result.push_back(std::move(found[i + 1]));
        return result;
    } catch (python_error &error) {
        error.persist(); /* its thread may not have the exception for long */
        throw;
    }
}

} // namespace oo

#endif
