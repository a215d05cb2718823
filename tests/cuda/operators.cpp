// operators.cpp - true values for PyTorch's operators on "cuda", without a GPU.
//
// Device memory is host memory here. So every aten operator that has a CUDA kernel gets a boxed one
// in its place, which sees its CUDA tensors as CPU tensors over the same bytes, runs the CPU's
// kernel, and puts what that made into tensors of torch's caching allocator. What it reads and
// writes is declared as a kernel on torch's current stream: the simulated driver first lets happen
// what is ordered before it, and nothing else, and reports what races.
//
// torch's own stay: allocation, views, streams, events, copies between host and device, random
// state, autograd, autocast. What the CPU has no kernel for is an error that names the operator.
#include <ATen/ATen.h>
#include <ATen/SDPBackend.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <cstring>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

extern "C" void (*cuda_sim_control(const char *name))();

namespace {

using at::Tensor;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
using c10::OperatorHandle;
using torch::jit::Stack;

// ---- kernels, as they are declared to the simulated driver ----

struct Range {
    uintptr_t address;
    size_t bytes;
};

void declare(const std::vector<Range> &reads, const std::vector<Range> &writes) {
    using Launch =
        int (*)(cudaStream_t, const Range *, size_t, const Range *, size_t, double seconds);
    static const auto launch = reinterpret_cast<Launch>(cuda_sim_control("simLaunch"));
    constexpr double LAUNCH_S = 5e-6, BYTES_PER_S = 5e11; // of no card: nothing here is a speed
    size_t bytes = 0;
    for (const auto *ranges : {&reads, &writes})
        for (const Range &range : *ranges)
            bytes += range.bytes;
    const double seconds = LAUNCH_S + static_cast<double>(bytes) / BYTES_PER_S;
    C10_CUDA_CHECK(
        static_cast<cudaError_t>(launch(c10::cuda::getCurrentCUDAStream(), reads.data(),
                                        reads.size(), writes.data(), writes.size(), seconds)));
}

// Everything from a tensor's first element to its last, what is between them included.
Range range_of(const Tensor &tensor) {
    if (!tensor.numel())
        return {0, 0};
    int64_t last = 0;
    for (int64_t i = 0; i < tensor.dim(); i++)
        last += (tensor.size(i) - 1) * tensor.stride(i);
    return {reinterpret_cast<uintptr_t>(tensor.const_data_ptr()),
            static_cast<size_t>(last + 1) * tensor.element_size()};
}

// ---- tensors of one device, seen from the other ----

bool is_cuda(const Tensor &tensor) {
    return tensor.defined() && tensor.device().is_cuda() && tensor.layout() == at::kStrided;
}

Tensor on_host(const Tensor &tensor) {
    const auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
    if (!tensor.numel())
        return at::empty_strided(tensor.sizes(), tensor.strides(), options);
    // Over the whole storage: some operators look at it. It cannot grow.
    c10::Storage storage(c10::Storage::use_byte_size_t(), tensor.storage().nbytes(),
                         at::DataPtr(const_cast<void *>(tensor.storage().data()), at::kCPU),
                         nullptr, false);
    Tensor seen = at::detail::make_tensor<c10::TensorImpl>(
        std::move(storage), DispatchKeySet(DispatchKey::CPU), tensor.dtype());
    c10::TensorImpl *raw = seen.unsafeGetTensorImpl();
    raw->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number())
        raw->set_wrapped_number(true);
    seen._set_conj(tensor.is_conj());
    seen._set_neg(tensor.is_neg());
    return seen;
}

// Kernels of the CPU call operators: none of what a thread has switched on is to see those.
struct Below {
    c10::impl::ExcludeDispatchKeyGuard guard{
        c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset |
        DispatchKeySet({DispatchKey::Python, DispatchKey::PythonTLSSnapshot,
                        DispatchKey::Functionalize, DispatchKey::PreDispatch})};
};

// Operators that take tensors of the host together with those of a card.
bool takes_both(const std::string &name) {
    static const std::set<std::string> some = {"aten::index",
                                               "aten::index_put_",
                                               "aten::_index_put_impl_",
                                               "aten::_unsafe_index",
                                               "aten::_pack_padded_sequence",
                                               "aten::_amp_foreach_non_finite_check_and_unscale_"};
    return some.count(name) != 0;
}

class Call {
  public:
    explicit Call(const std::string &name) : name_(name), mixes_(takes_both(name)) {}

    Tensor argument(const Tensor &tensor, bool written) {
        if (!is_cuda(tensor)) {
            if (tensor.defined() && tensor.dim() && tensor.device().is_cpu())
                from_host_ = true;
            return tensor;
        }
        if (!device)
            device = tensor.device();
        else if (tensor.dim() || tensor.device() == *device)
            TORCH_CHECK(tensor.device() == *device,
                        "Expected all tensors to be on the same device, but found at least two "
                        "devices, ",
                        *device, " and ", tensor.device(), "! (", name_, ")");
        if (const Range range = range_of(tensor); range.bytes)
            (written ? writes_ : reads_).push_back(range);
        Tensor &seen = seen_[tensor.unsafeGetTensorImpl()];
        if (!seen.defined()) {
            seen = on_host(tensor);
            originals_[seen.unsafeGetTensorImpl()] = tensor;
            if (written && !tensor.numel())
                may_grow_.emplace_back(tensor, seen);
        }
        return seen;
    }

    // All arguments are there.
    void begin() const {
        TORCH_CHECK(!from_host_ || mixes_ || reads_.size() + writes_.size() == 0,
                    "Expected all tensors to be on the same device, but found at least two "
                    "devices, ",
                    *device, " and cpu! (", name_, ")");
        declare(reads_, writes_);
    }

    void end() {
        for (auto &[original, seen] : may_grow_) {
            if (!seen.numel() && seen.sizes() == original.sizes())
                continue;
            original.resize_(seen.sizes());
            if (original.strides() != seen.strides())
                original.as_strided_(seen.sizes(), seen.strides());
            fill(original, seen);
        }
    }

    Tensor result(const Tensor &tensor) {
        if (!tensor.defined() || !tensor.device().is_cpu() || tensor.layout() != at::kStrided)
            return tensor;
        const auto found = originals_.find(tensor.unsafeGetTensorImpl());
        if (found != originals_.end())
            return found->second;
        Tensor made =
            at::empty_strided(tensor.sizes(), tensor.strides(),
                              tensor.options().device(*device).pinned_memory(std::nullopt));
        fill(made, tensor);
        return made;
    }

    std::optional<c10::Device> device;

  private:
    static void fill(const Tensor &to, const Tensor &from) {
        if (!from.numel())
            return;
        const Range range = range_of(from);
        declare({}, {{reinterpret_cast<uintptr_t>(to.mutable_data_ptr()), range.bytes}});
        std::memcpy(to.mutable_data_ptr(), reinterpret_cast<const void *>(range.address),
                    range.bytes);
        to._set_conj(from.is_conj());
        to._set_neg(from.is_neg());
    }

    std::string name_;
    bool mixes_, from_host_ = false;
    std::vector<Range> reads_, writes_;
    std::unordered_map<c10::TensorImpl *, Tensor> seen_, originals_; // of a card, of the host
    std::vector<std::pair<Tensor, Tensor>> may_grow_;
};

// The CPU's generator, seeded by the state of the card's, which moves on as a kernel moves it.
class Random {
  public:
    explicit Random(const std::optional<at::Generator> &given) {
        auto *generator = at::get_generator_or_default<at::CUDAGeneratorImpl>(
            given, at::cuda::detail::getDefaultCUDAGenerator());
        uint64_t seed = 0, offset = 0;
        {
            const std::lock_guard<std::mutex> hold(generator->mutex_);
            std::tie(seed, offset) = generator->philox_engine_inputs(4);
        }
        const std::lock_guard<std::mutex> hold(host_.mutex());
        before_ = host_.get_state();
        host_.set_current_seed(seed * 0x9E3779B97F4A7C15ULL + offset * 0xBF58476D1CE4E5B9ULL);
    }
    Random(const Random &) = delete;
    Random &operator=(const Random &) = delete;
    ~Random() {
        const std::lock_guard<std::mutex> hold(host_.mutex());
        host_.set_state(before_);
    }

  private:
    at::Generator host_ = at::detail::getDefaultCPUGenerator();
    Tensor before_;
};

// ---- the kernel that replaces all others ----

template <typename Change> void change_tensors(IValue &value, const Change &change) {
    if (value.isTensor()) {
        value = change(value.toTensor());
    } else if (value.isTensorList()) {
        std::vector<Tensor> list;
        for (const Tensor &tensor : value.toTensorVector())
            list.push_back(change(tensor));
        value = list;
    } else if (value.isOptionalTensorList()) {
        c10::List<std::optional<Tensor>> list;
        for (const std::optional<Tensor> &tensor : value.toOptionalTensorVector())
            list.push_back(tensor ? std::optional<Tensor>(change(*tensor)) : tensor);
        value = list;
    }
}

void refuse_capture(const std::string &name) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    C10_CUDA_CHECK(cudaStreamIsCapturing(c10::cuda::getCurrentCUDAStream(), &status));
    TORCH_CHECK_NOT_IMPLEMENTED(status == cudaStreamCaptureStatusNone, name,
                                ": no kernel goes into a graph without a GPU");
}

void on_cpu(const OperatorHandle &op, DispatchKeySet /*keys*/, Stack *stack) {
    const auto &schema = op.schema();
    const Below below;
    // The tensors of a list may be on both: torch's code for that takes them one by one.
    if (schema.name().rfind("aten::_foreach_", 0) == 0) {
        op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack);
        return;
    }
    const size_t count = schema.arguments().size(), first = stack->size() - count;
    Call call(schema.name());
    TORCH_CHECK_NOT_IMPLEMENTED(op.hasComputedKernelForDispatchKey(DispatchKey::CPU), schema.name(),
                                ".", schema.overload_name(),
                                " has no kernel without a GPU: the CPU has none");
    std::optional<at::Generator> generator;
    for (size_t i = 0; i < count; i++) {
        IValue &value = (*stack)[first + i];
        const auto *alias = schema.arguments()[i].alias_info();
        const bool written = alias && alias->isWrite();
        if (value.isDevice() && value.toDevice().is_cuda()) {
            if (!call.device)
                call.device = value.toDevice();
            value = c10::Device(at::kCPU);
        } else if (value.isGenerator()) {
            generator = value.toGenerator();
            value = IValue();
        } else {
            change_tensors(value,
                           [&](const Tensor &tensor) { return call.argument(tensor, written); });
        }
    }
    if (!call.device || !call.device->has_index())
        call.device = c10::Device(at::kCUDA, c10::cuda::current_device());
    const c10::cuda::CUDAGuard on(*call.device);
    refuse_capture(schema.name());
    call.begin();
    {
        std::optional<Random> random;
        if (op.hasTag(at::Tag::nondeterministic_seeded))
            random.emplace(generator);
        op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack);
    }
    call.end();
    for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); i++)
        change_tensors((*stack)[i], [&](const Tensor &tensor) { return call.result(tensor); });
    // The host reads how many there are.
    if (op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output))
        c10::cuda::getCurrentCUDAStream().synchronize();
}

// ---- operators that are not like the others ----

// One operator for all devices: within one it is a kernel, between two it is torch's own code.
std::optional<c10::SafeKernelFunction> torchs_copy;
void copy(const OperatorHandle &op, DispatchKeySet keys, Stack *stack) {
    const Tensor to = (*stack)[stack->size() - 3].toTensor();
    const Tensor from = (*stack)[stack->size() - 2].toTensor();
    if (is_cuda(to) && is_cuda(from) && to.device() == from.device())
        on_cpu(op, keys, stack);
    else
        torchs_copy->callBoxed(op, keys, stack);
}

void foreach_copy(at::TensorList to, at::TensorList from, bool non_blocking) {
    for (size_t i = 0; i < to.size(); i++)
        to[i].copy_(from[i], non_blocking);
}

// Counts of whole numbers, which the CPU does not count.
Tensor histogram(const Tensor &values, int64_t bins, const at::Scalar &low,
                 const at::Scalar &high) {
    const Tensor counted = at::histc(values.to(at::kCPU, at::kDouble), bins, low, high);
    return counted.to(values.device(), values.scalar_type());
}

int64_t attention_by_mathematics(const Tensor &, const Tensor &, const Tensor &,
                                 const std::optional<Tensor> &, double, bool, std::optional<double>,
                                 bool) {
    return static_cast<int64_t>(at::SDPBackend::math);
}

// The cells of recurrent layers, which a CPU has not in one piece. Shapes: (batch, hidden).
std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor &from_input, const Tensor &from_hidden,
                                             const Tensor &cell, const std::optional<Tensor> &b_i,
                                             const std::optional<Tensor> &b_h) {
    Tensor gates = from_input + from_hidden;
    if (b_i && b_i->defined())
        gates = gates + *b_i + *b_h;
    const auto parts = gates.chunk(4, 1);
    const Tensor in = parts[0].sigmoid(), keep = parts[1].sigmoid(), what = parts[2].tanh(),
                 out = parts[3].sigmoid();
    const Tensor next = keep * cell + in * what;
    return {out * next.tanh(), next, at::cat({in, keep, what, out}, 1)};
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(const std::optional<Tensor> &of_hidden,
                                                      const std::optional<Tensor> &of_cell,
                                                      const Tensor &cell, const Tensor &next,
                                                      const Tensor &workspace, bool biased) {
    const bool has_hidden = of_hidden && of_hidden->defined(),
               has_cell = of_cell && of_cell->defined();
    if (!has_hidden && !has_cell)
        return {};
    const auto parts = workspace.chunk(4, 1);
    const Tensor &in = parts[0], &keep = parts[1], &what = parts[2], &out = parts[3];
    const Tensor squashed = next.tanh();
    const Tensor hidden = has_hidden ? *of_hidden : at::zeros_like(cell);
    Tensor inner = hidden * out * (1 - squashed * squashed);
    if (has_cell)
        inner = inner + *of_cell;
    const Tensor gates =
        at::cat({inner * what * in * (1 - in), inner * cell * keep * (1 - keep),
                 inner * in * (1 - what * what), hidden * squashed * out * (1 - out)},
                1);
    return {gates, inner * keep, biased ? gates.sum(0) : Tensor()};
}

std::tuple<Tensor, Tensor> gru_cell(const Tensor &from_input, const Tensor &from_hidden,
                                    const Tensor &hidden, const std::optional<Tensor> &b_i,
                                    const std::optional<Tensor> &b_h) {
    const bool biased = b_i && b_i->defined();
    const auto i = (biased ? from_input + *b_i : from_input).chunk(3, 1);
    const auto h = (biased ? from_hidden + *b_h : from_hidden).chunk(3, 1);
    const Tensor reset = (i[0] + h[0]).sigmoid(), keep = (i[1] + h[1]).sigmoid();
    const Tensor fresh = (i[2] + reset * h[2]).tanh();
    return {fresh + keep * (hidden - fresh), at::cat({reset, keep, fresh, hidden, h[2]}, 1)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>
gru_cell_backward(const Tensor &of_hidden, const Tensor &workspace, bool biased) {
    const auto parts = workspace.chunk(5, 1);
    const Tensor &reset = parts[0], &keep = parts[1], &fresh = parts[2], &before = parts[3],
                 &h = parts[4];
    const Tensor of_keep = of_hidden * (before - fresh) * keep * (1 - keep);
    const Tensor of_fresh = of_hidden * (1 - keep) * (1 - fresh * fresh);
    const Tensor of_reset = of_fresh * h * reset * (1 - reset);
    const Tensor of_input = at::cat({of_reset, of_keep, of_fresh}, 1),
                 of_hidden_gates = at::cat({of_reset, of_keep, of_fresh * reset}, 1);
    return {of_input, of_hidden_gates, of_hidden * keep, biased ? of_input.sum(0) : Tensor(),
            biased ? of_hidden_gates.sum(0) : Tensor()};
}

// y = x * r * weight with r = 1 / rms(x) over the last dimensions.
std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor &of_y, const Tensor &x,
                                             at::IntArrayRef normalized, const Tensor &r,
                                             const std::optional<Tensor> &weight,
                                             std::array<bool, 2> wanted) {
    const bool weighted = weight && weight->defined();
    std::vector<int64_t> inner, outer;
    for (int64_t i = 0; i < x.dim(); i++)
        (i < x.dim() - static_cast<int64_t>(normalized.size()) ? outer : inner).push_back(i);
    const Tensor hat = x.to(r.scalar_type()) * r, of_y_wide = of_y.to(r.scalar_type());
    Tensor of_x, of_weight;
    if (wanted[0]) {
        const Tensor of_hat = weighted ? of_y_wide * weight->to(r.scalar_type()) : of_y_wide;
        of_x = (r * (of_hat - hat * (of_hat * hat).mean(inner, true))).to(x.scalar_type());
    }
    if (wanted[1] && weighted) {
        const Tensor each = of_y_wide * hat;
        of_weight = (outer.empty() ? each : each.sum(outer)).to(weight->scalar_type());
    }
    return {of_x, of_weight};
}

// ---- installation ----

// No kernel is in them: torch's own code for a card runs as it is.
const std::set<std::string> without_kernel = {"empty.memory_format",
                                              "empty_strided",
                                              "resize_",
                                              "set_",
                                              "set_.source_Storage",
                                              "set_.source_Storage_storage_offset",
                                              "set_.source_Tensor",
                                              "_local_scalar_dense",
                                              "record_stream",
                                              "is_set_to",
                                              "is_pinned",
                                              "_pin_memory",
                                              "_efficientzerotensor",
                                              "as_strided_"};
// Made of other operators for a card, of cuDNN's above all, or one for every device that launches a
// kernel of its own: the CPU's as a whole.
const std::set<std::string> as_a_whole = {"_convolution",
                                          "convolution",
                                          "convolution_backward",
                                          "convolution_overrideable",
                                          "ldexp.Tensor",
                                          "ldexp.out",
                                          "ldexp_"};

bool is_view(const c10::FunctionSchema &schema) {
    for (const auto &value : schema.returns())
        if (value.alias_info() && !value.alias_info()->isWrite())
            return true;
    return false;
}

struct Silent : c10::WarningHandler {
    void process(const c10::Warning & /*warning*/) override {}
};

int install() {
    Silent silent; // torch warns of each kernel that is replaced
    const c10::WarningUtils::WarningHandlerGuard quiet(&silent);
    static auto *aten = new torch::Library(torch::Library::IMPL, "aten", DispatchKey::CUDA,
                                           __FILE__, __LINE__); // kernels live as long as it
    auto &dispatcher = c10::Dispatcher::singleton();
    int replaced = 0;
    aten->impl("_foreach_copy_", TORCH_FN(foreach_copy));
    aten->impl("histc", TORCH_FN(histogram));
    aten->impl("_fused_sdp_choice", TORCH_FN(attention_by_mathematics));
    aten->impl("_thnn_fused_lstm_cell", TORCH_FN(lstm_cell));
    aten->impl("_thnn_fused_lstm_cell_backward_impl", TORCH_FN(lstm_cell_backward));
    aten->impl("_thnn_fused_gru_cell", TORCH_FN(gru_cell));
    aten->impl("_thnn_fused_gru_cell_backward", TORCH_FN(gru_cell_backward));
    aten->impl("_fused_rms_norm_backward", TORCH_FN(rms_norm_backward));
    const std::set<std::string> made = {"_foreach_copy_",
                                        "histc",
                                        "_fused_sdp_choice",
                                        "_thnn_fused_lstm_cell",
                                        "_thnn_fused_lstm_cell_backward_impl",
                                        "_thnn_fused_gru_cell",
                                        "_thnn_fused_gru_cell_backward",
                                        "_fused_rms_norm_backward"};
    at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&attention_by_mathematics);
    for (const auto &name : dispatcher.getAllOpNames()) {
        const auto op = dispatcher.findSchema(name);
        if (name.name.rfind("aten::", 0) != 0 || !op)
            continue;
        const std::string plain = name.name.substr(6),
                          full =
                              name.overload_name.empty() ? plain : plain + "." + name.overload_name;
        if (full == "copy_") {
            torchs_copy.emplace(op->getComputedKernelForDispatchKey(DispatchKey::CUDA));
            aten->impl("copy_", torch::CppFunction::makeFromBoxedFunction<&copy>());
        } else if ((op->hasKernelForDispatchKey(DispatchKey::CUDA) || as_a_whole.count(full)) &&
                   !without_kernel.count(full) && !made.count(full) && !is_view(op->schema())) {
            aten->impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&on_cpu>());
            replaced++;
        }
    }
    return replaced;
}

} // namespace

// How many kernels were replaced.
extern "C" __attribute__((visibility("default"))) int cuda_sim_install_operators() {
    return install();
}
