// A simulated CUDA device for builds of torch without CUDA: tensors of device "cuda" lie in host memory, and every
// operation on them is computed by the CPU's kernel, after checks that the CPU's kernel lacks (devices, generators,
// operations that only CPUs have).
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <map>
#include <mutex>
#include <set>

namespace sim {
using at::Tensor;
using c10::DispatchKey;
using c10::DispatchKeySet;

constexpr int kDevices = 8;
constexpr size_t kPage = 4096;
thread_local c10::DeviceIndex current = 0;
int count = 1;
int visible() {
  return count;
}
c10::Device normal(c10::Device d) { return d.index() < 0 ? c10::Device(d.type(), current) : d; }

// -- memory ------------------------------------------------------------------------------------------------------
std::mutex lock;
std::map<void*, std::pair<int64_t, int>> sizes;
std::set<void*> pinned;
int64_t used[kDevices], peaks[kDevices], total = 0;

std::map<void*, int> shared;  // files of memory that other processes may map (CUDA IPC)

void release(void* p) {
  if (!p) return;
  std::lock_guard<std::mutex> g(lock);
  auto it = sizes.find(p);
  if (auto file = shared.find(p); file != shared.end()) {
    // what is allocated here next is this process's own again
    const size_t n = (it->second.first + kPage - 1) / kPage * kPage;
    mmap(p, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    close(file->second);
    shared.erase(file);
  }
  if (it != sizes.end()) { used[it->second.second] -= it->second.first; sizes.erase(it); }
  std::free(p);
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    void* p = nullptr;
    TORCH_CHECK_WITH(OutOfMemoryError, !total || used[current] + int64_t(n) <= total, "CUDA out of memory. Tried to allocate ", n,
                     " bytes of GPU ", int(current), ", of which ", used[current], " bytes of ", total, " are in use (simulated)");
    const bool pages = n >= kPage;  // of its own, so that `share` can put a file there
    if (n && posix_memalign(&p, pages ? kPage : 512, pages ? (n + kPage - 1) / kPage * kPage : n)) TORCH_CHECK(false, "CUDA out of memory (simulated)");
    if (p) {
      // fresh device memory holds anything; NaNs show what was never written
      std::memset(p, 0xff, n);
      std::lock_guard<std::mutex> g(lock);
      int64_t rounded = (n + 511) / 512 * 512;
      sizes[p] = {rounded, current};
      used[current] += rounded;
      peaks[current] = std::max(peaks[current], used[current]);
    }
    return {p, p, &release, c10::Device(c10::kCUDA, current)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }
};
DeviceAllocator allocator;

int64_t share(const Tensor& t) {  // the file of the tensor's memory, which takes its place
  void* p = t.storage().mutable_data();
  const size_t n = (t.storage().nbytes() + kPage - 1) / kPage * kPage;
  std::lock_guard<std::mutex> g(lock);
  if (auto file = shared.find(p); file != shared.end()) return file->second;
  TORCH_CHECK(t.storage().nbytes() >= kPage, "simulated CUDA: too small to be shared");
  int file = memfd_create("cuda", MFD_CLOEXEC);
  TORCH_CHECK(file >= 0 && write(file, p, n) == ssize_t(n), "simulated CUDA: no memory to share");
  TORCH_CHECK(mmap(p, n, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0) == p, "simulated CUDA: cannot share");
  return shared[p] = file;
}
Tensor open_shared(const std::string& path, int64_t size, int64_t device) {  // maps what another process shares
  int file = ::open(path.c_str(), O_RDWR);
  TORCH_CHECK(file >= 0, "CUDA error: invalid resource handle (simulated)");
  void* p = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  TORCH_CHECK(p != MAP_FAILED, "CUDA error: mapping of buffer object failed (simulated)");
  auto unmap = [p, size](void*) { munmap(p, size); };
  return at::from_blob(p, {size}, unmap, at::TensorOptions().dtype(at::kByte).device(c10::kCUDA, device), c10::Device(c10::kCUDA, device));
}

void unpin(void* p) {
  std::lock_guard<std::mutex> g(lock);
  pinned.erase(p);
  std::free(p);
}
struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    void* p = nullptr;
    if (n && posix_memalign(&p, 64, n)) TORCH_CHECK(false, "no pinned memory");
    if (p) { std::lock_guard<std::mutex> g(lock); pinned.insert(p); }
    return {p, p, &unpin, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }
};
PinnedAllocator pinned_allocator;

// -- device guard, generators, hooks -----------------------------------------------------------------------------
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::Device exchangeDevice(c10::Device d) const override { auto old = getDevice(); setDevice(d); return old; }
  c10::Device getDevice() const override { return {c10::kCUDA, current}; }
  void setDevice(c10::Device d) const override { if (d.index() >= 0) current = d.index(); }
  void uncheckedSetDevice(c10::Device d) const noexcept override { if (d.index() >= 0) current = d.index(); }
  c10::Stream getStream(c10::Device d) const override { return c10::Stream(c10::Stream::DEFAULT, normal(d)); }
  c10::Stream getNewStream(c10::Device d, int = 0) const override { return c10::Stream(c10::Stream::DEFAULT, normal(d)); }
  c10::Stream exchangeStream(c10::Stream s) const override { return c10::Stream(c10::Stream::DEFAULT, s.device()); }
  c10::DeviceIndex deviceCount() const noexcept override { return visible(); }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
};

struct Generator final : c10::GeneratorImpl {
  at::Generator host;
  explicit Generator(c10::DeviceIndex i)
      : c10::GeneratorImpl(c10::Device(c10::kCUDA, i < 0 ? 0 : i), DispatchKeySet(DispatchKey::CUDA)),
        host(at::detail::createCPUGenerator()) {}
  void set_current_seed(uint64_t s) override { host.set_current_seed(s); }
  void set_offset(uint64_t) override {}
  uint64_t get_offset() const override { return 0; }
  uint64_t current_seed() const override { return host.current_seed(); }
  uint64_t seed() override { return host.seed(); }
  void set_state(const c10::TensorImpl& s) override {
    auto alias = c10::intrusive_ptr<c10::TensorImpl>::unsafe_reclaim_from_nonowning(const_cast<c10::TensorImpl*>(&s));
    host.set_state(Tensor(alias));
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return host.get_state().getIntrusivePtr(); }
  GeneratorImpl* clone_impl() const override { auto* g = new Generator(device().index()); g->host = host.clone(); return g; }
};
at::Generator& default_generator(c10::DeviceIndex i) {
  static std::vector<at::Generator> all = [] {
    std::vector<at::Generator> v;
    for (int k = 0; k < kDevices; k++) v.push_back(at::make_generator<Generator>(k));
    return v;
  }();
  return all[i < 0 ? current : i];
}

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  int getNumGPUs() const override { return visible(); }
  c10::DeviceIndex deviceCount() const override { return visible(); }
  c10::DeviceIndex current_device() const override { return current; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(c10::DeviceIndex i) const override { current = i; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex i) const override { auto o = current; current = i; return o; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex i) const override { auto o = current; if (i >= 0) current = i; return o; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex i = -1) const override { return default_generator(i); }
  at::Generator getNewGenerator(c10::DeviceIndex i = -1) const override { return at::make_generator<Generator>(i); }
  c10::Device getDeviceFromPtr(void*) const override { return {c10::kCUDA, current}; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  c10::Allocator* getCUDADeviceAllocator() const override { return &allocator; }
  bool isPinnedPtr(const void* p) const override {
    std::lock_guard<std::mutex> g(lock);
    return pinned.count(const_cast<void*>(p)) > 0;
  }
  void deviceSynchronize(c10::DeviceIndex) const override {}
};

// -- operations --------------------------------------------------------------------------------------------------
std::atomic<int64_t> kernels{0};

Tensor host_alias(const Tensor& t) {  // the same memory as a tensor of the CPU
  const auto& s = t.storage();
  c10::Storage alias(c10::Storage::use_byte_size_t(), s.nbytes(), c10::DataPtr(s.mutable_data(), c10::Device(c10::kCPU)), nullptr, false);
  auto out = at::detail::make_tensor<c10::TensorImpl>(std::move(alias), DispatchKeySet(DispatchKey::CPU), t.dtype());
  out.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  if (t.is_conj()) out.unsafeGetTensorImpl()->_set_conj(true);
  if (t.is_neg()) out.unsafeGetTensorImpl()->_set_neg(true);
  return out;
}

Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device> device,
             std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(normal(device.value_or(c10::Device(c10::kCUDA))));
  return at::detail::empty_generic(size, &allocator, DispatchKeySet(DispatchKey::CUDA), dtype.value_or(at::get_default_dtype_as_scalartype()), format);
}
Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                     std::optional<at::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(normal(device.value_or(c10::Device(c10::kCUDA))));
  return at::detail::empty_strided_generic(size, stride, &allocator, DispatchKeySet(DispatchKey::CUDA), dtype.value_or(at::get_default_dtype_as_scalartype()));
}
Tensor& copy_(Tensor& self, const Tensor& src, bool) {
  kernels++;
  c10::impl::ExcludeDispatchKeyGuard below(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
  auto to = self.is_cuda() ? host_alias(self) : self, from = src.is_cuda() ? host_alias(src) : src;
  to.copy_(from);
  return self;
}
Tensor to_device(const Tensor& host, c10::Device device) {
  if (!host.defined() || !host.device().is_cpu()) return host;
  c10::DeviceGuard guard(device);
  Tensor out = at::detail::empty_strided_generic(host.sizes(), host.strides(), &allocator, DispatchKeySet(DispatchKey::CUDA), host.scalar_type());
  host_alias(out).copy_(host);
  return out;
}
at::Scalar local_scalar(const Tensor& self) { return at::native::_local_scalar_dense_cpu(host_alias(self)); }

// Operations that take tensors of the CPU beside those of the GPU.
const std::set<std::string> kMixes = {"aten::index.Tensor", "aten::index.Tensor_out", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_",
  "aten::_unsafe_index.Tensor", "aten::record_stream", "aten::pin_memory", "aten::_foreach_copy_", "aten::is_pinned"};
// ... and those of which a GPU takes a number from the CPU (a 0-dimensional tensor); all that use TensorIterator, and fused optimizers.
const std::set<std::string> kWithoutIntegers = {"aten::mm", "aten::mm.out", "aten::bmm", "aten::bmm.out", "aten::addmm", "aten::addmm.out", "aten::baddbmm",
  "aten::baddbmm.out", "aten::addmv", "aten::addmv.out", "aten::mv", "aten::dot", "aten::vdot", "aten::addmm_", "aten::addbmm", "aten::linalg_solve_triangular"};

void fallback(const c10::OperatorHandle& op, DispatchKeySet, torch::jit::Stack* stack) {
  kernels++;
  const auto& schema = op.schema();
  const auto name = c10::toString(op.operator_name());
  TORCH_CHECK(name.find("for_cpu") == std::string::npos && name.find("mkldnn") == std::string::npos && name.find("onednn") == std::string::npos &&
              name.find("quantized::") == std::string::npos,
              "Could not run '", name, "' with arguments from the 'CUDA' backend: only CPUs have it");
  const auto& arguments = schema.arguments();
  const size_t n = arguments.size(), first = stack->size() - n;
  std::vector<c10::IValue> own(stack->begin() + first, stack->end());
  std::optional<c10::Device> device;
  bool has_host = false;
  std::string host_argument;
  auto look = [&](const Tensor& t, const std::string& what) {
    if (!t.defined()) return;
    if (t.is_cuda()) {
      TORCH_CHECK(!device || *device == t.device(), "Expected all tensors to be on the same device, but found at least two devices, ", *device, " and ", t.device(), "! (", name, ")");
      device = t.device();
    } else if (t.dim() > 0) { has_host = true; host_argument = what; }
  };
  for (size_t i = 0; i < n; i++) {
    const auto& v = own[i];
    if (v.isTensor()) look(v.toTensor(), arguments[i].name());
    else if (v.isTensorList()) for (const Tensor& t : v.toTensorVector()) look(t, arguments[i].name());
    else if (v.isOptionalTensorList()) { for (const auto& t : v.toOptionalTensorVector()) if (t) look(*t, arguments[i].name()); }
    else if (v.isDevice()) { if (!device && v.toDevice().is_cuda()) device = normal(v.toDevice()); }
  }
  TORCH_CHECK(!has_host || kMixes.count(name), "Expected all tensors to be on the same device, but got ", host_argument,
              " is on cpu, different from other tensors on ", device ? device->str() : "cuda", " (when checking argument in method wrapper_CUDA_", name, ")");
  if (kWithoutIntegers.count(name))
    for (const auto& v : own)
      TORCH_CHECK(!v.isTensor() || !v.toTensor().defined() || !c10::isIntegralType(v.toTensor().scalar_type(), true),
                  "\"", name, "_cuda\" not implemented for '", v.toTensor().scalar_type(), "'");
  std::vector<std::pair<Tensor, Tensor>> resized;  // outputs without memory: tensor, its stand-in
  auto lower = [&](const Tensor& t, bool write) -> Tensor {
    if (!t.defined() || !t.is_cuda()) return t;
    if (write && t.storage().nbytes() == 0) {
      auto stand_in = at::empty(t.sizes(), at::TensorOptions().dtype(t.dtype()));
      resized.emplace_back(t, stand_in);
      return stand_in;
    }
    return host_alias(t);
  };
  for (size_t i = 0; i < n; i++) {
    auto& v = (*stack)[first + i];
    const auto* alias = arguments[i].alias_info();
    const bool write = alias && alias->isWrite();
    if (own[i].isTensor()) v = lower(own[i].toTensor(), write);
    else if (own[i].isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& t : own[i].toTensorVector()) list.push_back(lower(t, write));
      v = list;
    } else if (own[i].isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const auto& t : own[i].toOptionalTensorVector()) list.push_back(t ? std::optional<Tensor>(lower(*t, write)) : t);
      v = list;
    } else if (own[i].isDevice()) v = c10::Device(c10::kCPU);
    else if (own[i].isGenerator()) {
      auto g = own[i].toGenerator();
      if (g.defined()) {
        TORCH_CHECK(g.device().is_cuda(), "Expected a 'cuda' device type for generator but found '", g.device().type(), "' (", name, ")");
        v = static_cast<Generator*>(g.unsafeGetGeneratorImpl())->host;
      }
    } else if (own[i].isNone() && arguments[i].name() == "generator")
      v = static_cast<Generator*>(default_generator(device ? device->index() : -1).unsafeGetGeneratorImpl())->host;
  }
  {
    c10::impl::ExcludeDispatchKeyGuard below(c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset);
    op.callBoxed(stack);
  }
  for (auto& [t, stand_in] : resized) {
    at::native::resize_(t, stand_in.sizes());
    if (stand_in.numel()) host_alias(t).copy_(stand_in);
  }
  const auto& returns = schema.returns();
  const size_t begin = stack->size() - returns.size();
  const auto where = device.value_or(c10::Device(c10::kCUDA, current));
  for (size_t i = 0; i < returns.size(); i++) {
    auto& v = (*stack)[begin + i];
    const auto* alias = returns[i].alias_info();
    if (alias && alias->isWrite()) {
      for (size_t k = 0; k < n; k++) {
        const auto* theirs = arguments[k].alias_info();
        if (theirs && *theirs == *alias) { v = own[k]; break; }
      }
      continue;
    }
    TORCH_CHECK(!alias, "simulated CUDA: view operation ", name, " has no kernel");
    if (v.isTensor()) v = to_device(v.toTensor(), where);
    else if (v.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& t : v.toTensorVector()) list.push_back(to_device(t, where));
      v = list;
    }
  }
}

void resize_bytes(const Tensor& t, int64_t n) {
  c10::DeviceGuard guard(t.device());
  auto storage = t.storage();
  at::native::resize_bytes_cpu(storage.unsafeGetStorageImpl(), n);
}
}  // namespace sim

namespace c10::impl {
C10_REGISTER_GUARD_IMPL(CUDA, sim::Guard)
}
namespace at {
C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", sim::Hooks)
}

static int installed = [] {
  c10::SetAllocator(c10::kCUDA, &sim::allocator);
  // torch made its hooks when it was imported, before this library could register its own: give them these methods
  static sim::Hooks hooks{at::CUDAHooksArgs()};
  *reinterpret_cast<void**>(const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks())) = *reinterpret_cast<void**>(&hooks);
  return 1;
}();

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&sim::fallback>()); }
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &sim::empty);
  m.impl("empty_strided", &sim::empty_strided);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("view_as_complex", &at::native::view_as_complex);
  m.impl("resize_", &at::native::resize_);
  m.impl("set_.source_Storage", [](at::Tensor& t, at::Storage s) -> at::Tensor& { return at::native::set_(t, s); });
  m.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
}
TORCH_LIBRARY(simulated_cuda, m) {
  m.def("resize_bytes(Tensor t, int n) -> ()", &sim::resize_bytes);
  m.def("copy_(Tensor(a!) self, Tensor src) -> ()", [](at::Tensor self, const at::Tensor& src) { sim::copy_(self, src, false); });
  m.def("local_scalar(Tensor self) -> Scalar", &sim::local_scalar);
  m.def("kernels() -> int", [] { return sim::kernels.load(); });
  m.def("allocated(int i) -> int", [](int64_t i) { return sim::used[i]; });
  m.def("peak(int i) -> int", [](int64_t i) { return sim::peaks[i]; });
  m.def("reset_peak(int i) -> ()", [](int64_t i) { sim::peaks[i] = sim::used[i]; });
  m.def("share(Tensor t) -> int", &sim::share);
  m.def("open_shared(str path, int size, int device) -> Tensor", &sim::open_shared);
  m.def("set_total(int n) -> ()", [](int64_t n) { sim::total = n; });
  m.def("current() -> int", [] { return int64_t(sim::current); });
  m.def("set_current(int i) -> ()", [](int64_t i) { sim::current = i; });
  m.def("set_count(int n) -> ()", [](int64_t n) { sim::count = int(n); });
  m.def("seed(int i, int seed) -> ()", [](int64_t i, int64_t s) { sim::default_generator(i).set_current_seed(s); });
}
