/* convolution.h - nn.Conv1d, nn.Conv2d and nn.Conv3d: operator and derivative, as in
 * layers/conv.py. What is padded before the operator goes to Python. */
#ifndef OO_CONVOLUTION_H
#define OO_CONVOLUTION_H

#include <ATen/ops/_unsafe_view.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>

#include "backward.h"

namespace oo {

/* Whether something pads in its own way: a ``_conv_forward`` that was put into the module. */
inline bool is_patched(PyObject *module) {
    return find(Owned(PyObject_GenericGetDict(module, nullptr)), names._conv_forward);
}

template <int axes> struct Convolution {
    static constexpr char name[] = {'C', 'o', 'n', 'v', '0' + axes, 'd', 0};
    static constexpr char node_name[] = {'M', 'a', 'n', 'a',        'g', 'e', 'd', 'C',
                                         'o', 'n', 'v', '0' + axes, 'd', 'B', 'a', 'c',
                                         'k', 'w', 'a', 'r',        'd', 0};

    /* What a call computes with beside tensors. */
    struct Call {
        Sizes stride, padding, dilation;
        int64_t groups;

        Owned kept(const Origin &origin) const;
        bool derive(const Origin &origin, Device &device, const at::Tensor &gradient,
                    const Needs &needs, Saved &saved, Gradients &found) const;
    };

    /* `ConvLayer.ready` and what `ConvLayer.call` does before the loan. */
    std::optional<Call> prepare(PyObject *layer, const Found &found, const at::Tensor &x) {
        const Owned module(PyObject_CallNoArgs(get(layer, names.module)));
        if (module == Py_None || is_patched(module))
            return {};
        const Owned own(PyObject_GenericGetDict(module, nullptr));
        if (!is_read(own, found.serial))
            read(layer, module, own, found.serial);
        const std::optional<Call> made = call; /* whatever other threads read meanwhile */
        if (!made || x.dim() != axes + 2 || x.size(1) != found.weight.size(1) * made->groups)
            return {};
        if (is_true(get(layer, names.state), names.simulated)) /* which asks the layer for them */
            ask(layer, names.read_arguments, static_cast<PyObject *>(module));
        return made;
    }

    static at::Tensor compute(const Call &call, const at::Tensor &x, const Weights &weights, bool) {
        return at::convolution(x, weights.weight, optional(weights.bias), call.stride, call.padding,
                               call.dilation, false, Sizes(axes, 0), call.groups);
    }

    /* The same with the backend that torch chooses in training: it asks for `requires_grad`. */
    static at::Tensor record(const Call &call, const at::Tensor &x, const Weights &weights, bool) {
        const at::Tensor needing = x.requires_grad() ? x : x.detach().requires_grad_();
        const at::AutoDispatchBelowAutograd below;
        const at::AutoGradMode on(true);
        const at::Tensor y = compute(call, needing, weights, true);
        return y.is_view() ? at::_unsafe_view(y, y.sizes()) : y; /* of one axis, in torch */
    }

  private:
    static std::optional<at::Tensor> optional(const at::Tensor &tensor) {
        return tensor.defined() ? std::optional(tensor) : std::nullopt;
    }

    /* The module's attributes that were read; anyone may assign them anew. */
    static std::array<PyObject *, 5> keys() {
        return {names.stride, names.padding, names.dilation, names.groups, names.padding_mode};
    }

    bool is_read(PyObject *own, int64_t now) const {
        const auto each = keys();
        for (size_t i = 0; i < each.size(); i++)
            if (!given[i] || find(own, each[i]) != given[i])
                return false;
        return serial == now;
    }

    /* `ConvLayer.read_arguments`; no call where the operator alone does not do it, or an argument
     * is a list, which may change where it is. */
    void read(PyObject *layer, PyObject *module, PyObject *own, int64_t now) {
        std::array<Owned, 5> found;
        std::optional<Call> made;
        const auto each = keys();
        bool usual = true;
        for (size_t i = 0; i < each.size(); i++) {
            PyObject *value = find(own, each[i]);
            usual &= value != nullptr;
            found[i] = Owned(Py_NewRef(value ? value : Py_None));
        }
        const Owned split = usual ? ask(layer, names.padding_of, module) : Owned();
        if (usual && PyTuple_GetItem(split, 1) == Py_None && PyLong_Check(found[3])) {
            const auto stride = sizes_in(found[0], axes), dilation = sizes_in(found[2], axes);
            const auto padding = sizes_in(PyTuple_GetItem(split, 0), axes);
            if (stride && padding && dilation)
                made = {*stride, *padding, *dilation, integer(found[3])};
        }
        given = std::move(found);
        call = std::move(made);
        serial = now;
    }

    std::array<Owned, 5> given;
    int64_t serial = -1; /* of the Masters: 'same' pads by their size */
    std::optional<Call> call;
};

template <int axes> Owned Convolution<axes>::Call::kept(const Origin &origin) const {
    const Owned shape = tuple_of(origin.shape), strides = tuple_of(origin.stride);
    const Owned steps = tuple_of(stride), pads = tuple_of(padding), spread = tuple_of(dilation);
    return Owned(Py_BuildValue("{s(OO)s(OOOL)sO}", "geometry", static_cast<PyObject *>(shape),
                               static_cast<PyObject *>(strides), "arguments",
                               static_cast<PyObject *>(steps), static_cast<PyObject *>(pads),
                               static_cast<PyObject *>(spread), static_cast<long long>(groups),
                               "saves_input", origin.trains[0] ? Py_True : Py_False));
}

template <int axes>
bool Convolution<axes>::Call::derive(const Origin &origin, Device &device,
                                     const at::Tensor &gradient, const Needs &needs, Saved &saved,
                                     Gradients &found) const {
    const at::Tensor x = origin.trains[0]
                             ? saved.get()
                             : at::empty_strided(origin.shape, origin.stride, gradient.options());
    const auto made = origin.lend_again(device, gradient, needs, [&](const Weights &weights) {
        const Sizes size = {weights.weight.size(0)};
        return at::convolution_backward(
            gradient, x, weights.weight,
            weights.bias.defined() ? at::OptionalIntArrayRef(size) : std::nullopt, stride, padding,
            dilation, false, Sizes(axes, 0), groups, needs);
    });
    if (!made)
        return false;
    const auto &[of_input, of_weight, of_bias] = *made;
    found = {of_input, of_weight, of_bias};
    for (size_t i = 0; i < 3; i++)
        if (!needs[i]) /* some backends return more than they were asked for */
            found[i] = at::Tensor();
    return true;
}

} // namespace oo

#endif
