// Where torch would launch a CUDA kernel, the CPU's kernel is queued on the stream, to run late in the same memory:
// "device" memory is host memory. What it will give (shapes, dtypes) comes from the operator's kernel for "meta". Where
// there is none, or the host must know values, the stream is waited for and the kernel runs at once. The allocator,
// streams, events, copies between memories, autograd, autocast and process groups stay torch's own.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/copy_native.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/InferenceMode.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>
#include <functional>
#include <set>
#include <string>

extern "C" void late_cuda_push(cudaStream_t stream, std::function<void()> run);
extern "C" void late_cuda_wait(cudaStream_t stream, const char* why);
extern "C" void late_cuda_fail(const char* what);

namespace {
using c10::IValue;
using at::Tensor;
using Stack = torch::jit::Stack;
using Names = std::set<std::string>;

Tensor host_view(const Tensor& t) {  // the same memory, as a tensor of the host; it keeps nothing alive
  if (!t.defined()) return t;
  c10::InferenceMode off(false);
  Tensor r;
  if (t.is_cpu()) {  // taken now, as arguments of a kernel are
    r = t.detach().clone();
  } else if (t.numel() == 0) {
    r = at::empty_strided(t.sizes(), t.strides(), at::TensorOptions().dtype(t.dtype()));
  } else {
    TORCH_CHECK(t.storage().nbytes() > 0 && t.data_ptr(), "late_cuda: a tensor has no memory, ", t.sizes());
    r = at::from_blob(t.data_ptr(), t.sizes(), t.strides(), at::TensorOptions().dtype(t.dtype()));
  }
  if (t.is_neg()) r._set_neg(true);
  if (t.is_conj()) r._set_conj(true);
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) r.unsafeGetTensorImpl()->set_wrapped_number(true);
  return r;
}
Tensor like(const Tensor& t, c10::Device device) {  // new memory
  if (!t.defined()) return t;
  return at::empty_strided(t.sizes(), t.strides(), at::TensorOptions().dtype(t.dtype()).device(device));
}
template <class F> IValue mapped(const IValue& v, F f) {
  if (v.isTensor()) return f(v.toTensor());
  if (v.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& t : v.toTensorVector()) list.push_back(f(t));
    return list;
  }
  if (v.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const std::optional<Tensor>& t : v.toOptionalTensorVector())
      list.push_back(t ? std::optional<Tensor>(f(*t)) : std::nullopt);
    return list;
  }
  return v;
}

// Tensors of other devices are refused as CUDA does; but these operators take tensors of the host.
c10::Device device_of(const std::string& name, const std::vector<IValue>& given) {
  static const Names mixed = {"aten::copy_", "aten::index", "aten::index_put_", "aten::_index_put_impl_",
                              "aten::_unsafe_index", "aten::_unsafe_index_put", "aten::index_put",
                              "aten::repeat_interleave", "aten::tensor_split"};
  std::optional<c10::Device> cuda;
  bool on_host = false;
  for (auto& v : given) {
    if (v.isDevice() && v.toDevice().is_cuda()) cuda = v.toDevice();
    mapped(v, [&](const Tensor& t) {
      if (!t.defined()) return t;
      on_host |= t.is_cpu() && t.dim() > 0;
      if (t.is_cuda() && cuda && cuda->has_index() && *cuda != t.device()) on_host = true;
      if (t.is_cuda()) cuda = t.device();
      return t;
    });
  }
  TORCH_CHECK(!on_host || !cuda || mixed.count(name),
              "Expected all tensors to be on the same device, but found at least two devices! (", name, ")");
  if (!cuda || !cuda->has_index()) return {c10::kCUDA, c10::cuda::current_device()};
  return *cuda;
}
at::Generator host_generator(at::Generator cuda) {  // follows the seed and the offset of the GPU's
  std::lock_guard<std::mutex> lock(cuda.mutex());
  uint64_t seed = cuda.current_seed(), offset = cuda.get_offset();
  cuda.set_offset(offset + 4);
  return at::detail::createCPUGenerator(seed * 0x9E3779B97F4A7C15ull + offset + 1);
}

struct Call {
  c10::OperatorHandle op;
  Stack args;  // of the host
  at::Generator dropout;

  Stack operator()() const {
    at::AutoDispatchBelowADInplaceOrView below;
    c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    Stack s = args;
    const std::string& name = op.schema().name();
    std::optional<at::ScalarType> result;
    if (name == "aten::native_dropout") {
      double p = s[1].toDouble();
      Tensor x = s[0].toTensor(), mask = at::empty_strided(x.sizes(), x.strides(), x.options().dtype(at::kBool));
      mask.bernoulli_(1 - p, dropout);
      return {x.mul(mask).mul_(p == 1 ? 0.0 : 1.0 / (1.0 - p)), mask};
    }
    if ((name == "aten::_softmax" || name == "aten::_log_softmax") && s[2].toBool()) {
      s[0] = s[0].toTensor().to(at::kFloat);
      s[2] = false;
    } else if (name == "aten::_softmax_backward_data" || name == "aten::_log_softmax_backward_data") {
      auto want = at::ScalarType(s[3].toInt()), have = s[0].toTensor().scalar_type();
      if (want != have) s[3] = int64_t(have), result = want;
    } else if (name == "aten::native_layer_norm_backward" || name == "aten::native_group_norm_backward") {
      size_t mean = name[13] == 'l' ? 3 : 2;  // CUDA keeps these two in fp32 always, the CPU beside fp32 weights
      Tensor x = s[1].toTensor(), weight = s[mean + 2].isTensor() ? s[mean + 2].toTensor() : x;
      if (weight.defined() && weight.scalar_type() == x.scalar_type())
        for (size_t i : {mean, mean + 1}) s[i] = s[i].toTensor().to(x.scalar_type());
    }
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &s);
    if (result) s[0] = s[0].toTensor().to(*result);
    return s;
  }
};

bool shapes(const c10::OperatorHandle& op, const std::vector<IValue>& given, Stack& out) {
  const c10::Device meta(c10::kMeta);
  if (op.schema().name() == "aten::native_dropout") {
    out = {like(given[0].toTensor(), meta), like(given[0].toTensor().to(meta, at::kBool), meta)};
    return true;
  }
  static const Names on_values = {"aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::repeat_interleave",
                                  "aten::equal", "aten::bincount", "aten::unique_consecutive", "aten::unique_dim"};
  if (on_values.count(op.schema().name()) || !op.hasComputedKernelForDispatchKey(c10::DispatchKey::Meta)) return false;
  for (auto& r : op.schema().returns())
    if (r.type()->kind() != c10::TypeKind::TensorType && r.type()->kind() != c10::TypeKind::ListType) return false;
  out.clear();
  for (auto& v : given) {
    bool bits = false;
    out.push_back(v.isDevice() ? IValue(meta) : v.isGenerator() ? IValue() : mapped(v, [&](const Tensor& t) {
      bits |= t.defined() && (t.is_neg() || t.is_conj());
      return t.defined() && t.is_cpu() && t.dim() == 0 ? t : like(t, meta);
    }));
    if (bits) return false;
  }
  try {
    at::AutoDispatchBelowADInplaceOrView below;
    c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &out);
  } catch (const std::exception& e) {
    if (getenv("LATE_CUDA_VERBOSE")) fprintf(stderr, "%s: %.300s\n", op.schema().name().c_str(), e.what());
    return false;  // the CPU's kernel will say what is wrong
  }
  return true;
}

void run(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  const auto& schema = op.schema();
  const auto& args = schema.arguments();
  const auto& returns = schema.returns();
  const size_t n = args.size(), m = returns.size();
  std::vector<IValue> given(stack->end() - n, stack->end());
  stack->erase(stack->end() - n, stack->end());
  c10::Device device = device_of(schema.name(), given);
  c10::DeviceGuard guard(device);
  auto stream = c10::cuda::getCurrentCUDAStream(device.index()).stream();
  auto written = [&](size_t i) { return args[i].alias_info() && args[i].alias_info()->isWrite(); };

  bool makes = false, grows = false;  // new tensors; tensors given as out=, which are resized
  for (auto& r : returns) makes |= !r.alias_info();
  for (size_t i = 0; i < n; i++)
    grows |= args[i].kwarg_only() && written(i) && given[i].isTensor() && given[i].toTensor().is_cuda() &&
             given[i].toTensor().numel() == 0;
  Stack results;
  bool late = !grows && (!makes || shapes(op, given, results));
  if (!late) late_cuda_wait(stream, ("kernels at once: " + schema.name()).c_str());

  Call call{op, {}, {}};
  for (size_t i = 0; i < n; i++) {
    IValue v = mapped(given[i], host_view);
    if (v.isDevice()) v = c10::Device(c10::kCPU);
    if (args[i].name() == "generator") {
      auto generator = v.isGenerator() ? v.toGenerator() : at::globalContext().defaultGenerator(device);
      if (generator.device().is_cuda()) v = host_generator(generator);
    }
    call.args.push_back(v);
  }
  if (schema.name() == "aten::native_dropout")
    call.dropout = host_generator(at::globalContext().defaultGenerator(device));

  auto put = [&](const Tensor& own, const Tensor& t) {  // behind the fill of new memory (deterministic algorithms)
    if (!own.numel()) return;
    late_cuda_wait(stream, "values put at once");
    host_view(own).copy_(t);
  };
  Stack host;
  std::vector<std::pair<Tensor, size_t>> outs;
  if (!late) {
    host = call();
    for (size_t i = 0; i < n; i++)
      if (grows && written(i) && given[i].isTensor() && given[i].toTensor().numel() == 0) {
        Tensor own = given[i].toTensor(), made = call.args[i].toTensor();
        own.resize_(made.sizes());
        put(own, made);
      }
  }
  for (size_t r = 0; r < m; r++) {
    if (auto* a = returns[r].alias_info()) {  // what was given is given back
      for (size_t i = 0; i < n; i++)
        if (written(i) && args[i].alias_info()->beforeSets() == a->beforeSets()) { stack->push_back(given[i]); break; }
      continue;
    }
    stack->push_back(mapped(late ? results[r] : host[r], [&](const Tensor& t) {
      if (!t.defined()) return t;
      Tensor own = like(t, device);
      if (late) outs.push_back({own.numel() ? host_view(own) : own, r});
      else put(own, t);
      return own;
    }));
  }
  if (!late) return;
  late_cuda_push(stream, [call = std::move(call), outs = std::move(outs)] {
    at::set_num_threads(1);
    try {
      Stack host = call();
      std::vector<size_t> place(host.size(), 0);
      for (auto& [own, r] : outs) {
        Tensor t = host[r].isTensor() ? host[r].toTensor() : host[r].toTensorVector()[place[r]++];
        TORCH_CHECK(t.defined() && t.sizes() == own.sizes(), "gives ", t.sizes(), " instead of ", own.sizes());
        if (own.numel()) own.copy_(t);
      }
    } catch (const std::exception& e) {
      std::string what = e.what();
      late_cuda_fail((call.op.schema().name() + ": " + what.substr(0, what.find("\nException"))).c_str());
    }
  });
}

Tensor& copy(Tensor& self, const Tensor& src, bool non_blocking) {
  bool plain = self.scalar_type() == src.scalar_type() && self.is_contiguous() && src.is_contiguous() &&
               self.is_neg() == src.is_neg() && self.is_conj() == src.is_conj() && self.sizes() == src.sizes();
  if (!self.is_cuda() || !src.is_cuda() || !self.numel() || plain) return at::native::copy_(self, src, non_blocking);
  TORCH_CHECK(self.device() == src.device(), "late_cuda: a copy between GPUs that is not plain");
  c10::DeviceGuard guard(self.device());
  Tensor to = host_view(self), from = host_view(src);
  late_cuda_push(c10::cuda::getCurrentCUDAStream().stream(), [to, from] {
    at::set_num_threads(1);
    at::AutoDispatchBelowADInplaceOrView below;
    Tensor(to).copy_(from);
  });
  return self;
}

struct Quiet : c10::WarningHandler {  // torch warns that its kernels are replaced
  void process(const c10::Warning&) override {}
};
struct Registered {
  torch::Library library{torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__};
  Registered() {
    Quiet quiet;
    c10::WarningUtils::WarningHandlerGuard guard(&quiet);
    // torch's own work without a kernel.
    static const Names own = {"copy_", "empty", "empty_strided", "resize_", "set_", "record_stream", "is_pinned",
                              "_local_scalar_dense", "_pin_memory", "pin_memory", "_copy_from", "_copy_from_and_resize",
                              "_efficientzerotensor", "_cuda_getCurrentRawStream", "_fused_sdp_choice", "view",
                              "_use_cudnn_ctc_loss", "_reshape_alias", "as_strided", "unfold", "_nested_from_padded",
                              "is_set_to", "resize_as_", "_to_sparse", "_lazy_clone"};
    auto& dispatcher = c10::Dispatcher::singleton();
    for (auto& full : dispatcher.getAllOpNames()) {
      auto op = full.name.rfind("aten::", 0) ? std::nullopt : dispatcher.findSchema(full);
      if (!op || !op->hasKernelForDispatchKey(c10::DispatchKey::CUDA)) continue;
      bool host = op->hasKernelForDispatchKey(c10::DispatchKey::CPU) ||
                  op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd);
      bool view = false;
      for (auto& r : op->schema().returns()) view |= r.alias_info() && !r.alias_info()->isWrite();
      auto bare = full.name.substr(6);
      if (!host || view || own.count(bare)) continue;
      auto label = full.overload_name.empty() ? bare : bare + "." + full.overload_name;
      library.impl(label.c_str(), torch::CppFunction::makeFromBoxedFunction<&run>());
    }
    library.impl("copy_", TORCH_FN(copy));
  }
};
Registered registered;
}  // namespace
