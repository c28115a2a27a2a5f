// One CUDA device on paper, for builds of torch without CUDA: what torch asks a device in C++ before it lets fake
// tensors of cuda:0 through autograd. No kernel is here; fake tensors need none.
#include <ATen/Context.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/FakeGuardImpl.h>

#include <map>
#include <mutex>

namespace {

// Host memory that is pinned, by its first byte.
std::mutex guard;
std::map<const char*, size_t> pinned;

void pin(const void* data, size_t bytes) {
  const std::lock_guard<std::mutex> lock(guard);
  pinned[static_cast<const char*>(data)] = bytes;
}

void unpin(const void* data) {
  const std::lock_guard<std::mutex> lock(guard);
  pinned.erase(static_cast<const char*>(data));
}

bool is_pinned(const void* data) {
  const std::lock_guard<std::mutex> lock(guard);
  auto after = pinned.upper_bound(static_cast<const char*>(data));
  if (after == pinned.begin()) return false;
  --after;
  return static_cast<const char*>(data) < after->first + after->second;
}

void release(void* data) {
  unpin(data);
  c10::GetDefaultCPUAllocator()->raw_deallocate(data);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = c10::GetDefaultCPUAllocator()->raw_allocate(bytes);
    pin(data, bytes);
    return {data, data, &release, at::Device(at::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* target, const void* source, size_t bytes) const override {
    default_copy_data(target, source, bytes);
  }
};

// As a GPU of today chooses. SDPBackend: 1 is flash, for half precision without a mask; 2 the memory-efficient one, for
// as many heads of keys as of queries; 0 plain arithmetic. One that torch was told to leave out is passed over.
int64_t choose_attention(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor&, const std::optional<at::Tensor>& mask, double,
    bool, std::optional<double>, bool) {
  const bool half = query.scalar_type() == at::kHalf || query.scalar_type() == at::kBFloat16;
  const auto& told = at::globalContext();
  if (told.userEnabledFlashSDP() && half && !mask.has_value() && query.size(-1) <= 256) return 1;
  const bool alike = query.scalar_type() != at::kDouble && query.dim() == 4 && query.size(1) == key.size(1);
  return told.userEnabledMemEfficientSDP() && alike ? 2 : 0;
}

}  // namespace

namespace at {

struct CUDAHooks : public CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  int getNumGPUs() const override { return 1; }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  Allocator* getPinnedMemoryAllocator() const override {
    static PinnedAllocator allocator;
    return &allocator;
  }
};

REGISTER_CUDA_HOOKS(CUDAHooks);

namespace native {
REGISTER_CUDA_DISPATCH(_fused_sdp_choice_stub, &choose_attention)
}

}  // namespace at

static c10::impl::DeviceGuardImplRegistrar registered(
    c10::DeviceType::CUDA, new c10::impl::FakeGuardImpl<c10::DeviceType::CUDA>());

extern "C" void weft_paper_pin(const void* data, size_t bytes) { pin(data, bytes); }
extern "C" void weft_paper_unpin(const void* data) { unpin(data); }
