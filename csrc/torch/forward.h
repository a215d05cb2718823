/* forward.h - what a call computes, and records for its backward. */
#ifndef OO_FORWARD_H
#define OO_FORWARD_H

#include <torch/csrc/autograd/functions/utils.h>

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/SavedTensorHooks.h>
#include <ATen/TracerMode.h>
#include <ATen/autocast_mode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include "backward.h"

namespace oo {

inline PyObject *kept_cast_there, *keeps_casts_with_grad_there; /* of Python, held for ever */

/* The node of a kind of layers. */
template <typename Kind> class Backward : public ManagedBackward {
  public:
    Backward(torch::autograd::edge_list &&edges, Origin &&found, const at::Tensor &saved,
             typename Kind::Call &&made)
        : ManagedBackward(std::move(edges), std::move(found), saved), call(std::move(made)) {}

    std::string name() const override { return Kind::node_name; }

  protected:
    bool derive(Device &device, const at::Tensor &gradient, const Needs &needs, Saved &saved,
                Gradients &found) const override {
        return call.derive(origin, device, gradient, needs, saved, found);
    }
    Owned kept() const override { return call.kept(origin); }

  private:
    const typename Kind::Call call;
};

/* A pointer to a node as this torch counts it. */
template <typename Pointer, typename Made> Pointer pointer_to(Made *made) {
    if constexpr (std::is_same_v<Pointer, std::shared_ptr<Node>>)
        return Pointer(made, [](auto *node) { deleteNode(node); });
    else
        return Pointer::unsafe_steal_from_new(made);
}

using Pointer = decltype(torch::autograd::Edge::function);

/* ---- forward ---- */

/* `Linear(device)` and its like: computes as `layer(x)` does, when it is called with both. */
template <typename Kind> struct Native {
    PyObject_HEAD vectorcallfunc call;
    c10::Device device;
    Known known;
    Kind kind;
};

template <typename Kind> inline PyObject *native_type; /* of these, held for ever */

/* Whether nobody sees more of a call than its operators: what `Layer.ready` looks at. */
inline bool is_plain(PyObject *layer) {
    return !is_transformed() && !at::tracer::impl::is_dispatch_enabled() &&
           !at::impl::torch_function_mode_enabled() &&
           !c10::impl::TorchDispatchModeTLS::get_mode(c10::impl::TorchDispatchModeKey::PROXY) &&
           !is_profiled() && !is_true(get(layer, names.structure), names.changed) &&
           !(is_true(layer, names.coded) && is_true(ask(layer, names.has_stale_codes)));
}

/* Whether the input is an ordinary one, on the device. */
inline bool is_usual(const at::Tensor &x, const c10::Device &device) {
    return x.device().type() == device.type() && x.layout() == at::kStrided && !x.is_nested() &&
           !x._fw_grad(0).defined();
}

/* Whether autocast keeps the cast of this tensor for all its uses in the region. */
inline bool is_kept(const at::Tensor &x) {
    return x.requires_grad() && x.is_leaf() && x.scalar_type() == at::kFloat && !x.is_view() &&
           at::autocast::is_autocast_cache_enabled();
}

/* `cast_requires_grad` of autocast.py. */
inline bool cast_requires_grad(const at::Tensor &x, const c10::Device &device) {
    if (!is_kept(x) || c10::InferenceMode::is_enabled())
        return false;
    const Owned type(PyUnicode_FromString(c10::DeviceTypeName(device.type(), true).c_str()));
    return is_true(Owned(PyObject_CallOneArg(keeps_casts_with_grad_there, type)));
}

/* The cast that autocast keeps, which Python finds. */
inline at::Tensor kept_cast(const at::Tensor &x, at::ScalarType dtype) {
    const Owned wrapped(THPVariable_Wrap(x));
    return THPVariable_Unpack(Owned(PyObject_CallFunctionObjArgs(
        kept_cast_there, static_cast<PyObject *>(wrapped),
        reinterpret_cast<PyObject *>(torch::getTHPDtype(dtype)), nullptr)));
}

/* What is asked of the engine for a forward now. */
inline oo_request forward_request(PyObject *layer, const Device &device, PyObject *masters,
                                  const at::Tensor &x, bool training) {
    const int64_t task = torch::autograd::get_current_graph_task_id();
    oo_request request{};
    request.member = static_cast<uint32_t>(integer(layer, names.member));
    request.kind = task != -1 ? OO_RECOMPUTE : training ? OO_RECORDED : OO_FORWARD;
    request.stamp = stamp_of(masters);
    request.task = task;
    if (device.is_simulated) {
        const Owned wrapped(THPVariable_Wrap(x));
        request.seconds =
            number(ask(layer, names.forward_seconds, static_cast<PyObject *>(wrapped)));
    }
    return request;
}

/* What the gradient of a master goes to: undefined where it needs none, `stands` where that is what
 * autocast would have cast it to. */
inline at::Tensor taker(PyObject *layer, const at::Tensor &master, Cast dtype, bool &stands) {
    stands = master.defined() && master.requires_grad() && is_cast(master, dtype);
    if (!stands)
        return master.defined() && master.requires_grad() ? master : at::Tensor();
    const Owned attachment = get(layer, names.attachment);
    const Owned stand_ins = get(attachment, names.stand_ins);
    const Owned wrapped(THPVariable_Wrap(master));
    return THPVariable_Unpack(ask(stand_ins, names.of, static_cast<PyObject *>(wrapped),
                                  reinterpret_cast<PyObject *>(torch::getTHPDtype(*dtype))));
}

/* Compute below a node of the graph, as `Loan.forward` does. */
template <typename Kind>
at::Tensor record(const Found &found, PyObject *layer, const at::Tensor &x,
                  typename Kind::Call &&call) {
    std::array<bool, 2> stand_in;
    const at::Tensor of_weight = taker(layer, found.weight, found.dtype, stand_in[0]);
    const at::Tensor of_bias = taker(layer, found.bias, found.dtype, stand_in[1]);
    Device device(layer);
    at::Tensor saved = x;
    std::optional<at::Tensor> y;
    oo_request request;
    {
        const at::AutoGradMode off(false);
        request = forward_request(layer, device, found.masters, x, true);
        if (request.task == -1 && is_true(device.state, names.turned))
            ask(device.state, names.begin_forward);
        y = lend(layer, device, request, found.dtype, [&](const Weights &weights) {
            return Kind::record(call, saved, weights, of_weight.defined());
        });
        if (!y)
            return {};
        if (of_weight.defined() || of_bias.defined())
            note_trainable(device.state, request.task);
    }
    Origin origin{layer,
                  found.masters,
                  found.dtype,
                  request.task,
                  version_of(found.weight),
                  found.where,
                  x.sizes().vec(),
                  x.strides().vec(),
                  {of_weight.defined(), of_bias.defined()},
                  stand_in};
    auto edges = torch::autograd::collect_next_edges(x);
    for (const at::Tensor &trained : {of_weight, of_bias})
        if (trained.defined())
            edges.push_back(torch::autograd::impl::gradient_edge(trained));
    torch::autograd::set_history(
        *y, pointer_to<Pointer>(new Backward<Kind>(std::move(edges), std::move(origin),
                                                   of_weight.defined() ? saved : at::Tensor(),
                                                   std::move(call))));
    return *y;
}

/* Compute as `Layer.lend_unrecorded` does. */
template <typename Kind>
at::Tensor compute(const Found &found, PyObject *layer, at::Tensor x, typename Kind::Call &&call,
                   bool training) {
    Device device(layer);
    /* A view of a trained weight requires grad even without grad mode; a cast may. */
    const bool trains = is_cast(found.weight, found.dtype)
                            ? cast_requires_grad(found.weight, x.device())
                            : found.weight.requires_grad();
    const oo_request request = forward_request(layer, device, found.masters, x, training);
    return lend(layer, device, request, found.dtype,
                [&](const Weights &weights) { return Kind::compute(call, x, weights, trains); })
        .value_or(at::Tensor());
}

/* What a layer computes with; nothing where Python must take over. */
template <typename Kind>
std::optional<Found> find(Native<Kind> &self, PyObject *layer, const at::Tensor &x) {
    Owned masters = get(layer, names.masters);
    if (!is_usual(x, self.device) || !is_plain(layer) || !self.known.are_there(layer, masters))
        return {};
    const auto &[weight, bias] = self.known.rows;
    return Found{std::move(masters),
                 self.known.serial,
                 THPVariable_Unpack(weight.tensor),
                 bias.tensor ? THPVariable_Unpack(bias.tensor) : at::Tensor(),
                 weight.where,
                 {}};
}

/* `Layer.__call__`; undefined where Python must take over. */
template <typename Kind> at::Tensor forward(Native<Kind> &self, PyObject *layer, at::Tensor x) {
    std::optional<Found> usual = find(self, layer, x);
    if (!usual)
        return {};
    Found &found = *usual;
    auto call = self.kind.prepare(layer, found, x);
    if (!call)
        return {};
    if (at::autocast::is_autocast_enabled(self.device.type())) {
        found.dtype = at::autocast::get_autocast_dtype(self.device.type());
        if (is_cast(x, found.dtype) && is_kept(x) && at::GradMode::is_enabled() &&
            at::SavedTensorDefaultHooks::is_enabled())
            x = kept_cast(x, *found.dtype);
        const pybind11::gil_scoped_release without;
        x = cast(x, found.dtype);
    }
    const bool records =
        at::GradMode::is_enabled() && (x.requires_grad() || found.weight.requires_grad() ||
                                       (found.bias.defined() && found.bias.requires_grad()));
    const at::Tensor y =
        records ? record<Kind>(found, layer, x, std::move(*call))
                : compute<Kind>(found, layer, x, std::move(*call), at::GradMode::is_enabled());
    n_forward += y.defined();
    return y;
}

} // namespace oo

#endif
