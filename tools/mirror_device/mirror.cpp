// A device of torch's PrivateUse1 kind whose memory is a part of the host's. torch sees a device like any other: other
// kinds cannot touch its tensors, and collectives of gloo refuse them. Every operator without a kernel here copies its
// inputs to the host, runs there, and copies the results back.
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/view_cpu_dispatch.h>
#include <ATen/ops/_reshape_alias_cpu_dispatch.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <chrono>

namespace {

constexpr auto KIND = c10::DeviceType::PrivateUse1;
constexpr c10::DeviceIndex NUM_DEVICES = 2;
thread_local c10::DeviceIndex current = 0;
std::atomic<int64_t> allocated{0}, peak{0};

// Memory: blocks of the host's allocator, with their size in front for the counters.

constexpr size_t HEADER = 64;

void release(void* data) {
  if (data == nullptr) return;
  char* block = static_cast<char*>(data) - HEADER;
  allocated -= *reinterpret_cast<int64_t*>(block);
  c10::GetDefaultCPUAllocator()->raw_deallocate(block);
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device device(KIND, current);
    if (bytes == 0) return {nullptr, nullptr, &release, device};
    char* block = static_cast<char*>(c10::GetDefaultCPUAllocator()->raw_allocate(bytes + HEADER));
    *reinterpret_cast<int64_t*>(block) = static_cast<int64_t>(bytes);
    const int64_t now = allocated += static_cast<int64_t>(bytes);
    int64_t most = peak;
    while (now > most && !peak.compare_exchange_weak(most, now)) {
    }
    return {block + HEADER, block + HEADER, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* target, const void* source, size_t bytes) const override {
    default_copy_data(target, source, bytes);
  }
};

DeviceAllocator allocator;
REGISTER_ALLOCATOR(KIND, &allocator)

// The device guard. Work is finished when a call returns, so streams have no order to keep.

using Moment = std::chrono::steady_clock::time_point;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return KIND; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    current = device.index();
    return before;
  }
  c10::Device getDevice() const override { return {KIND, current}; }
  void setDevice(c10::Device device) const override { current = device.index(); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current = device.index(); }
  c10::Stream getStream(c10::Device device) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getDefaultStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return c10::Stream(c10::Stream::DEFAULT, device);
  }
  c10::Stream getNewStream(c10::Device device, int) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override { return getStream(stream.device()); }
  c10::DeviceIndex deviceCount() const noexcept override { return NUM_DEVICES; }
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new Moment;
    *static_cast<Moment*>(*event) = std::chrono::steady_clock::now();
  }
  double elapsedTime(void* start, void* end, const c10::DeviceIndex) const override {
    const auto passed = *static_cast<Moment*>(end) - *static_cast<Moment*>(start);
    return std::chrono::duration<double, std::milli>(passed).count();
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Moment*>(event);
  }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};

c10::impl::DeviceGuardImplRegistrar guard(KIND, new Guard());

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return NUM_DEVICES; }
  void setCurrentDevice(c10::DeviceIndex index) const override { current = index; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override { return std::exchange(current, index); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override { return std::exchange(current, index); }
  at::Allocator* getPinnedMemoryAllocator() const override { return c10::GetDefaultCPUAllocator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    const c10::DeviceIndex before = std::exchange(current, storage.device().index());
    c10::DataPtr data = allocator.allocate(bytes);
    current = before;
    if (const size_t kept = std::min(bytes, storage.nbytes())) std::memcpy(data.get(), storage.data(), kept);
    storage.set_data_ptr_noswap(std::move(data));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};

// Kernels: memory and copies. Everything else runs on the host.

c10::DeviceIndex index_of(std::optional<c10::Device> device) {
  return device.has_value() && device->has_index() ? device->index() : current;
}

at::Tensor empty(
    c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::DeviceIndex before = std::exchange(current, index_of(device));
  auto made = at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype), format);
  current = before;
  return made;
}

at::Tensor empty_strided(
    c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  const c10::DeviceIndex before = std::exchange(current, index_of(device));
  auto made = at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &allocator,
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
  current = before;
  return made;
}

// A host tensor over the memory of a tensor of the device.
at::Tensor host_view(const at::Tensor& tensor) {
  if (tensor.device().type() != KIND) return tensor;
  const auto bytes = tensor.storage().nbytes();
  c10::Storage storage(
      c10::Storage::use_byte_size_t(), bytes,
      c10::DataPtr(const_cast<void*>(tensor.storage().data()), c10::Device(c10::DeviceType::CPU)),
      c10::GetDefaultCPUAllocator(), false);
  auto view = at::empty({0}, at::TensorOptions().dtype(tensor.scalar_type()).device(at::kCPU));
  view.set_(storage, tensor.storage_offset(), tensor.sizes(), tensor.strides());
  if (tensor.is_conj()) view._set_conj(true);
  if (tensor.is_neg()) view._set_neg(true);
  return view;
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool) {
  const at::NoGradGuard no_grad;
  host_view(target).copy_(host_view(source));
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  at::native::resize_output(target, source.sizes());
  return copy_from(source, target, false);
}

at::Scalar local_scalar(const at::Tensor& tensor) { return host_view(tensor).item(); }

const at::Tensor& resize(
    const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return at::cpu::set_(self, source);
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source) { return at::cpu::set_(self, source); }

at::Tensor& set_storage_offset(
    at::Tensor& self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::cpu::set__symint(self, source, offset, size, stride);
}

void record_stream(at::Tensor&, c10::Stream) {}

bool is_pinned(const at::Tensor&, std::optional<at::Device>) { return false; }

void on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) { at::native::cpu_fallback(op, stack); }

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("as_strided", at::cpu::as_strided_symint);
  library.impl("view", at::cpu::view_symint);
  library.impl("_reshape_alias", at::cpu::_reshape_alias_symint);
  library.impl("resize_", resize);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", local_scalar);
  library.impl("set_.source_Tensor", set_tensor);
  library.impl("set_.source_Storage", set_storage);
  library.impl("set_.source_Storage_storage_offset", set_storage_offset);
  library.impl("record_stream", record_stream);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&on_host>()); }

extern "C" void mirror_register() {
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
}
extern "C" int64_t mirror_allocated() { return allocated; }
extern "C" int64_t mirror_peak() { return peak; }
extern "C" void mirror_reset_peak() { peak = allocated.load(); }
extern "C" int mirror_current() { return current; }
extern "C" void mirror_set_current(int index) { current = static_cast<c10::DeviceIndex>(index); }
