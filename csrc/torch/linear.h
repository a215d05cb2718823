/* linear.h - nn.Linear: operator and derivative, call by call those of layers/linear.py. */
#ifndef OO_LINEAR_H
#define OO_LINEAR_H

#include <ATen/TensorUtils.h>
#include <ATen/ops/_unsafe_view.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>

#include <algorithm>

#include "backward.h"

namespace oo {

/* Whether ``at::matmul`` of this torch goes by the stride of an axis of one: see layers/linear.py,
 * which asks it, and tells before any layer computes here. */
inline bool reads_ones;

/* Whether ``at::matmul`` multiplies an input of three or more dimensions as one matrix. */
inline bool folds(at::IntArrayRef shape, at::IntArrayRef stride) {
    bool exact = true;
    int64_t before = -1; /* the stride of the axis before */
    for (size_t i = 0; i + 1 < shape.size(); i++)
        if (reads_ones || shape[i] != 1) {
            exact &= before < 0 || before == stride[i] * shape[i];
            before = stride[i];
        }
    return exact || std::find(shape.begin(), shape.end(), 0) != shape.end();
}

/* Whether a tensor of this geometry is contiguous, as torch counts it. */
inline bool is_contiguous(at::IntArrayRef shape, at::IntArrayRef stride) {
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

inline int64_t rows_of(at::IntArrayRef shape) {
    int64_t rows = 1;
    for (size_t i = 0; i + 1 < shape.size(); i++)
        rows *= shape[i];
    return rows;
}

struct Linear {
    static constexpr char name[] = "Linear", node_name[] = "ManagedLinearBackward";

    /* Of one call, for its backward: the strides of the matrix that a trained weight's input was
     * folded into. */
    struct Call {
        std::optional<Sizes> folded;

        Owned kept(const Origin &origin) const;
        bool derive(const Origin &origin, Device &device, const at::Tensor &gradient,
                    const Needs &needs, Saved &saved, Gradients &found) const;
        at::Tensor of_input(const Origin &origin, const at::Tensor &gradient,
                            const Weights &weights) const;
    };

    std::optional<Call> prepare(PyObject *, const Found &, const at::Tensor &) { return Call(); }

    /* ``F.linear``; `trains` where torch would see a weight that requires grad. */
    static at::Tensor compute(Call &call, at::Tensor &x, const Weights &weights, bool trains) {
        const auto &[weight, bias] = weights;
        /* Without a bias torch goes by the strides alone, also by that of an axis of one. */
        if (!trains || x.dim() <= 2 || folds(x.sizes(), x.strides()) ||
            (bias.defined() && x.is_contiguous())) {
            at::Tensor y =
                at::linear(x, weight, bias.defined() ? std::optional(bias) : std::nullopt);
            /* torch forbids in-place changes of a view that a custom function returns. */
            return y.is_view() ? at::_unsafe_view(y, y.sizes()) : y;
        }
        Sizes shape = x.sizes().vec();
        x = x.reshape({rows_of(shape), shape.back()});
        call.folded = x.strides().vec();
        shape.back() = weight.size(0);
        at::Tensor y = at::_unsafe_view(at::mm(x, weight.t()), shape);
        return bias.defined() ? y.add_(bias) : y;
    }

    /* The same where autograd records; `x` becomes what is kept for the weight's gradient. */
    static at::Tensor record(Call &call, at::Tensor &x, const Weights &weights, bool trains) {
        return compute(call, x, weights, trains);
    }
};

inline Owned Linear::Call::kept(const Origin &origin) const {
    const Owned shape = tuple_of(origin.shape), stride = tuple_of(origin.stride);
    const Owned matrix = folded ? tuple_of(*folded) : Owned(Py_NewRef(Py_None));
    return Owned(Py_BuildValue("{s(OOO)}", "geometry", static_cast<PyObject *>(shape),
                               static_cast<PyObject *>(stride), static_cast<PyObject *>(matrix)));
}

/* `input_gradient`, by the operator that torch would use for this geometry. */
inline at::Tensor Linear::Call::of_input(const Origin &origin, const at::Tensor &gradient,
                                         const Weights &weights) const {
    const at::Tensor &weight = weights.weight;
    const auto &[shape, stride] = std::tie(origin.shape, origin.stride);
    if (shape.size() == 2) {
        if (stride[0] == 1 && stride[1] == shape[0])
            return at::mm(weight.t(), gradient.t()).t();
        return at::mm(gradient, weight);
    }
    const int64_t rows = rows_of(shape), features = shape.back();
    if (shape.size() > 2 && !folded && !folds(shape, stride) &&
        !(weights.bias.defined() && is_contiguous(shape, stride))) {
        const int64_t within = shape[shape.size() - 2], batch = rows / within;
        const at::Tensor each = weight.expand({batch, weight.size(0), weight.size(1)});
        return at::bmm(gradient.reshape({batch, within, weight.size(0)}), each).reshape(shape);
    }
    const at::Tensor matrix = gradient.reshape({rows, weight.size(0)});
    /* ``mm_mat1_grad`` turns the product round for a column-major input. */
    const Sizes as_matrix = {rows, features};
    const auto strides = folded ? folded : at::detail::computeStride(shape, stride, as_matrix);
    if (strides && *strides == Sizes{1, rows})
        return at::mm(weight.t(), matrix.t()).t().reshape(shape);
    return at::mm(matrix, weight).reshape(shape);
}

/* Of the weight, from the input as it was kept. */
inline at::Tensor of_weight(const at::Tensor &input, const at::Tensor &gradient,
                            const at::Tensor &master) {
    const bool flat = input.dim() == 2;
    const at::Tensor x = flat ? input : input.reshape({rows_of(input.sizes()), input.size(-1)});
    const at::Tensor g =
        gradient.dim() == 2 ? gradient : gradient.reshape({x.size(0), gradient.size(-1)});
    if (master.stride(0) == master.size(1) && master.stride(1) == 1)
        return at::mm(g.t(), x);
    return at::mm(x.t(), g).t();
}

inline at::Tensor of_bias(const Origin &origin, const at::Tensor &gradient) {
    at::Tensor g = gradient;
    if (origin.shape.size() != 2 && is_contiguous(origin.shape, origin.stride))
        g = g.reshape({rows_of(origin.shape), g.size(-1)});
    if (g.dim() == 1)
        return g;
    Sizes all;
    for (int64_t i = 0; i + 1 < g.dim(); i++)
        all.push_back(i);
    return g.sum(all);
}

inline bool Linear::Call::derive(const Origin &origin, Device &device, const at::Tensor &gradient,
                                 const Needs &needs, Saved &saved, Gradients &found) const {
    if (needs[0]) {
        const auto made = origin.lend_again(device, gradient, needs, [&](const Weights &weights) {
            return of_input(origin, gradient, weights);
        });
        if (!made)
            return false;
        found[0] = *made;
    }
    if (!needs[1] && !needs[2])
        return true;
    const at::Tensor input = needs[1] ? saved.get() : at::Tensor();
    const Owned masters = get(origin.layer, names.masters);
    const Owned present = get(masters, names.present);
    const at::Tensor master = THPVariable_Unpack(PyTuple_GetItem(present, 0));
    const pybind11::gil_scoped_release without;
    if (needs[1])
        found[1] = of_weight(input, gradient, master);
    if (needs[2])
        found[2] = of_bias(origin, gradient);
    return true;
}

} // namespace oo

#endif
