/* dispatcher.h - what the operators that a compiler sees run: those of nn.Linear and of
 * convolutions, as in layers/traced.py. There they are defined, with what compilers are told of
 * them; each has a twin there whose kernels are Python's, which runs wherever anything is not as
 * usual. */
#ifndef OO_DISPATCHER_H
#define OO_DISPATCHER_H

#include <torch/library.h>

#include <ATen/ops/empty.h>

#include "convolution.h"
#include "forward.h"
#include "linear.h"

namespace oo {

using torch::jit::Stack;

inline PyObject *layers_there; /* of Python: weak references to layers, by their number */

/* What an operator was given, in the order of its schema. */
struct Forward {
    enum : size_t { x, weight, bias, key, dtype, recorded, others };
};
enum : int64_t { NOT, HERE, BY_GRAPH }; /* what `recorded` is */
struct Again {                          /* backward */
    enum : size_t { gradient, x, size, stride, weight, bias, key, dtype, needs, others };
};

class Given {
  public:
    Given(const c10::OperatorHandle &op, Stack &stack)
        : count(op.schema().arguments().size()), first(&stack[stack.size() - count]) {}
    const c10::IValue &operator[](size_t i) const { return first[i]; }
    const at::Tensor &tensor(size_t i) const { return first[i].toTensor(); }
    at::Tensor optional(size_t i) const {
        return first[i].isNone() ? at::Tensor() : first[i].toTensor();
    }
    Cast dtype(size_t i) const {
        return first[i].isNone() ? Cast() : Cast(first[i].toScalarType());
    }
    Sizes sizes(size_t i) const {
        if (first[i].isIntList())
            return first[i].toIntVector();
        Sizes found;
        for (const c10::SymInt &size : first[i].toSymIntVector())
            found.push_back(size.expect_int());
        return found;
    }

    const size_t count;

  private:
    const c10::IValue *const first;
};

/* `above_autograd`: torch is called as by eager code. */
class AboveAutograd {
    static c10::impl::LocalDispatchKeySet keys() {
        c10::impl::LocalDispatchKeySet set = c10::impl::tls_local_dispatch_key_set();
        set.excluded_ =
            set.excluded_ - c10::DispatchKeySet({c10::DispatchKey::AutogradFunctionality,
                                                 c10::DispatchKey::AutogradOther,
                                                 c10::DispatchKey::ADInplaceOrView});
        return set;
    }
    const c10::impl::ForceDispatchKeyGuard guard{keys()};
};

/* The layer that a key names; None where it is gone. */
inline Owned layer_of(const at::Tensor &key) {
    const Owned number(PyLong_FromLongLong(*key.const_data_ptr<int64_t>()));
    PyObject *reference = find(layers_there, number);
    return Owned(reference ? PyObject_CallNoArgs(reference) : Py_NewRef(Py_None));
}

/* What computes for a layer; nothing where Python does, or refuses to. */
template <typename Kind> Native<Kind> *native_of(PyObject *layer) {
    if (layer == Py_None || integer(layer, names.member) < 0)
        return nullptr;
    const Owned native = get(layer, names.native);
    const bool is_one = reinterpret_cast<PyObject *>(Py_TYPE(native)) == native_type<Kind>;
    return is_one ? reinterpret_cast<Native<Kind> *>(static_cast<PyObject *>(native)) : nullptr;
}

/* `Traced.is_master`, of a master that has not moved. */
inline bool is_same(const at::Tensor &used, const at::Tensor &master) {
    if (!used.defined() || !master.defined())
        return used.defined() == master.defined();
    return used.const_data_ptr() == master.const_data_ptr() &&
           used.scalar_type() == master.scalar_type() && used.sizes() == master.sizes() &&
           used.strides() == master.strides();
}

/* ---- what is each kind's own ---- */

inline Linear::Call call_of(const Linear *, const Given &, size_t) { return {}; }

template <int axes>
typename Convolution<axes>::Call call_of(const Convolution<axes> *, const Given &given, size_t i) {
    return {given.sizes(i), given.sizes(i + 1), given.sizes(i + 2), given[i + 3].toInt()};
}

/* `ready` of the kind, and `taking`, whose costs a simulated device asks for. */
inline bool takes(const Linear::Call &, PyObject *) { return true; }

template <typename Call> bool takes(const Call &call, PyObject *layer) {
    const Owned module(PyObject_CallNoArgs(get(layer, names.module)));
    if (module == Py_None || is_patched(module))
        return false;
    if (is_true(get(layer, names.state), names.simulated))
        ask(layer, names.taking, static_cast<PyObject *>(tuple_of(call.stride)),
            static_cast<PyObject *>(tuple_of(call.padding)),
            static_cast<PyObject *>(tuple_of(call.dilation)),
            static_cast<PyObject *>(Owned(PyLong_FromLongLong(call.groups))));
    return true;
}

/* `restore`: the input as backward wants it. */
inline at::Tensor restore(Linear::Call &call, const Origin &origin, at::Tensor x, bool biased) {
    const auto &[shape, stride] = std::tie(origin.shape, origin.stride);
    if (!x.defined() || shape.size() <= 2 ||
        (is_contiguous(shape, stride) && (biased || folds(shape, stride))))
        return x;
    x = x.reshape({rows_of(shape), shape.back()});
    call.folded = x.strides().vec();
    return x;
}

template <typename Call> at::Tensor restore(Call &, const Origin &, at::Tensor x, bool) {
    return x;
}

/* ---- what they run; nothing where Python must ---- */

template <typename Kind> at::Tensor compute_by_operator(const Given &given) {
    const Owned layer = layer_of(given.tensor(Forward::key));
    const int64_t recorded = given[Forward::recorded].toInt();
    Native<Kind> *self = recorded == HERE ? nullptr : native_of<Kind>(layer);
    if (!self)
        return {};
    const bool training = recorded == BY_GRAPH || at::GradMode::is_enabled();
    const AboveAutograd above;
    const at::AutoGradMode off(false);
    const at::Tensor &x = given.tensor(Forward::x);
    std::optional<Found> found = find(*self, layer, x);
    if (!found || !is_same(given.tensor(Forward::weight), found->weight) ||
        !is_same(given.optional(Forward::bias), found->bias))
        return {};
    found->dtype = given.dtype(Forward::dtype);
    auto call = call_of(&self->kind, given, Forward::others);
    if (!takes(call, layer))
        return {};
    const at::Tensor y = compute<Kind>(*found, layer, x, std::move(call), training);
    n_forward += y.defined();
    return y;
}

template <typename Kind> std::optional<Gradients> differentiate_by_operator(const Given &given) {
    const Owned layer = layer_of(given.tensor(Again::key));
    Native<Kind> *self = native_of<Kind>(layer);
    if (!self || is_transformed() || is_profiled())
        return {};
    const Owned masters = get(layer, names.masters);
    if (!self->known.are_there(layer, masters))
        return {};
    const auto &[weight, bias] = self->known.rows;
    const at::Tensor master = THPVariable_Unpack(weight.tensor);
    if (!is_same(given.tensor(Again::weight), master))
        return {};
    const at::Tensor &gradient = given.tensor(Again::gradient), x = given.optional(Again::x);
    const c10::List<bool> wanted = given[Again::needs].toBoolList();
    const Needs needs = {wanted[0], wanted[1], wanted[2]};
    if (needs[1] && !x.defined())
        return {};
    Device device(layer);
    if (PyObject_SetAttr(device.state, names.turned, Py_True) < 0)
        raise();
    const AboveAutograd above;
    const at::AutoGradMode off(false);
    const int64_t task = torch::autograd::get_current_graph_task_id();
    const Origin origin{layer,
                        masters,
                        given.dtype(Again::dtype),
                        task,
                        version_of(master),
                        weight.where,
                        given.sizes(Again::size),
                        given.sizes(Again::stride),
                        {x.defined(), false},
                        {}};
    const std::array<at::ScalarType, 2> dtypes = {weight.dtype, bias.dtype};
    auto call = call_of(&self->kind, given, Again::others);
    Saved saved(restore(call, origin, x, bias.tensor != nullptr));
    Gradients found;
    if (!call.derive(origin, device, gradient, needs, saved, found))
        return {};
    for (size_t i = 1; i < 3; i++)
        if (found[i].defined())
            found[i] = to_host(layer, device, found[i].to(dtypes[i - 1]));
    if (needs[1] || needs[2])
        note_trainable(device.state, task);
    n_backward++;
    return found;
}

/* ---- the kernels ---- */

/* Which kind an operator's arguments are of. */
struct Linears {
    template <typename Visit> static auto visit(const Given &, size_t, const Visit &visit) {
        return visit(static_cast<Linear *>(nullptr));
    }
};
struct Convolutions {
    template <typename Visit>
    static auto visit(const Given &given, size_t others, const Visit &visit) {
        switch (given.sizes(others).size()) {
        case 1:
            return visit(static_cast<Convolution<1> *>(nullptr));
        case 2:
            return visit(static_cast<Convolution<2> *>(nullptr));
        default:
            return visit(static_cast<Convolution<3> *>(nullptr));
        }
    }
};

/* Run something with the GIL; torch's bindings know Python's exceptions by pybind11's class. */
template <typename Run> auto with_python(const Run &run) {
    const pybind11::gil_scoped_acquire gil;
    try {
        return run();
    } catch (python_error &error) {
        error.restore();
        throw pybind11::error_already_set();
    }
}

inline void run_in_python(const c10::OperatorHandle &op, c10::DispatchKeySet keys, Stack *stack) {
    c10::Dispatcher::singleton()
        .findSchemaOrThrow((op.schema().name() + "_in_python").c_str(), "")
        .redispatchBoxed(keys, stack);
}

template <typename Kinds>
void run_forward(const c10::OperatorHandle &op, c10::DispatchKeySet keys, Stack *stack) {
    const Given given(op, *stack);
    at::Tensor y = Kinds::visit(given, Forward::others, [&](auto *kind) {
        return with_python(
            [&] { return compute_by_operator<std::remove_pointer_t<decltype(kind)>>(given); });
    });
    if (!y.defined())
        return run_in_python(op, keys, stack);
    torch::jit::drop(*stack, given.count);
    torch::jit::push(*stack, std::move(y));
}

template <typename Kinds>
void run_backward(const c10::OperatorHandle &op, c10::DispatchKeySet keys, Stack *stack) {
    const Given given(op, *stack);
    std::optional<Gradients> found = Kinds::visit(given, Again::others, [&](auto *kind) {
        return with_python([&] {
            return differentiate_by_operator<std::remove_pointer_t<decltype(kind)>>(given);
        });
    });
    if (!found)
        return run_in_python(op, keys, stack);
    const at::Tensor nothing = at::empty({0}, given.tensor(Again::gradient).options());
    torch::jit::drop(*stack, given.count);
    for (at::Tensor &gradient : *found)
        torch::jit::push(*stack, gradient.defined() ? std::move(gradient) : nothing);
}

/* Where autograd looks on, but records nothing: the graph that calls has its own node. */
inline void run_below_autograd(const c10::OperatorHandle &op, c10::DispatchKeySet keys,
                               Stack *stack) {
    const Given given(op, *stack);
    const at::Tensor &key = given.tensor(Forward::key);
    const bool is_traced = key.key_set().has_any(
        c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::Functionalize}));
    bool records = false;
    if (at::GradMode::is_enabled())
        for (const size_t i : {+Forward::x, +Forward::weight, +Forward::bias})
            records |= !given[i].isNone() && given.tensor(i).requires_grad();
    const bool begins = given[Forward::recorded].toInt() != NOT;
    if (records || is_traced)
        return run_in_python(op, keys, stack);
    if (begins && !with_python([&] {
            const Owned layer = layer_of(key);
            if (layer == Py_None)
                return false;
            const Owned state = get(layer, names.state);
            if (is_true(state, names.turned) && torch::autograd::get_current_graph_task_id() == -1)
                ask(state, names.begin_forward);
            return true;
        }))
        return run_in_python(op, keys, stack);
    const at::AutoDispatchBelowAutograd below;
    op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
}

/* Put the kernels of a kind below those of Python, which compilers and other devices keep. */
template <typename Kinds> void add_kernels(torch::Library &library, const std::string &name) {
    using torch::CppFunction;
    for (const auto key :
         {c10::DispatchKey::CPU, c10::DispatchKey::CUDA, c10::DispatchKey::PrivateUse1}) {
        library.impl(
            name.c_str(),
            torch::dispatch(key, CppFunction::makeFromBoxedFunction<run_forward<Kinds>>()));
        library.impl(
            (name + "_backward").c_str(),
            torch::dispatch(key, CppFunction::makeFromBoxedFunction<run_backward<Kinds>>()));
    }
    for (const auto key : {c10::DispatchKey::AutogradCPU, c10::DispatchKey::AutogradCUDA,
                           c10::DispatchKey::AutogradPrivateUse1})
        library.impl(
            name.c_str(),
            torch::dispatch(key, CppFunction::makeFromBoxedFunction<run_below_autograd>()));
}

/* Once in a process: another build's kernels call Python for layers that are not theirs. */
inline void add_all_kernels() {
    const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("oracle_offload::linear", "");
    if (op.hasKernelForDispatchKey(c10::DispatchKey::CPU))
        return;
    static torch::Library library(torch::Library::IMPL, "oracle_offload", std::nullopt, __FILE__,
                                  __LINE__);
    add_kernels<Linears>(library, "linear");
    add_kernels<Convolutions>(library, "convolution");
}

} // namespace oo

#endif
