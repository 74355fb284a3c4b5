// What torch asks of a device: its guard, hooks and generators, and the Python module.
#include "runtime.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>

#include <cstring>

namespace emul {
c10::Allocator* pinned_allocator();
void use_block_on(const c10::DataPtr& data, Stream* stream);
int device_of(void* pointer);

namespace {
using Index = c10::DeviceIndex;

int known(Index device) { return device < 0 ? current_device() : device; }

struct Event { MomentPtr last; };
MomentPtr last_of(void* event) { return event ? static_cast<Event*>(event)->last : nullptr; }

struct Guard final : public c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = c10::kPrivateUse1;
  Guard() = default;
  explicit Guard(c10::DeviceType) {}
  c10::DeviceType type() const override { return static_type; }
  c10::Device getDevice() const override { return {static_type, static_cast<Index>(current_device())}; }
  void setDevice(c10::Device device) const override { if (device.index() >= 0) set_device(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { if (device.index() >= 0) set_device(device.index()); }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  Index deviceCount() const noexcept override { return device_count(); }

  c10::Stream getStream(c10::Device device) const override { return wrap(current(device.index())); }
  c10::Stream getDefaultStream(c10::Device device) const override { return wrap(default_stream(device.index())); }
  c10::Stream getNewStream(c10::Device device, int = 0) const override {
    default_stream(0);
    return wrap(new_stream(known(device.index()), SIDE));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool = false) const override { return getNewStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return wrap(exchange_current(stream_of(stream))); }
  bool queryStream(const c10::Stream& stream) const override { return is_idle(stream_of(stream)); }
  void synchronizeStream(const c10::Stream& stream) const override { synchronize(stream_of(stream)); }
  void synchronizeDevice(const Index device) const override { synchronize_device(device); }

  void record(void** event, const c10::Stream& stream, const Index, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new Event;
    static_cast<Event*>(*event)->last = emul::record(stream_of(stream));
  }
  void block(void* event, const c10::Stream& stream) const override { wait_for(stream_of(stream), last_of(event)); }
  bool queryEvent(void* event) const override { return host_query(last_of(event)); }
  void synchronizeEvent(void* event) const override {
    host_wait(last_of(event));
    raise_errors();
  }
  void destroyEvent(void* event, const Index) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void* first, void* second, const Index) const override {
    return std::chrono::duration<double, std::milli>(last_of(second)->when - last_of(first)->when).count();
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    use_block_on(data, stream_of(stream));
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// The CPU's generator under the device's name; kernels that draw run synchronously.
struct Generator : public at::CPUGeneratorImpl {
  explicit Generator(int device) : at::CPUGeneratorImpl(c10::detail::getNonDeterministicRandom()) {
    device_ = c10::Device(c10::kPrivateUse1, static_cast<Index>(device));
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
};
std::vector<at::Generator>& generators() {
  static auto* all = [] {
    auto* made = new std::vector<at::Generator>;
    for (int device = 0; device < device_count(); device++) made->push_back(at::make_generator<Generator>(device));
    return made;
  }();
  return *all;
}

struct Hooks final : public at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(Index) const override { return true; }
  void init() const override { default_stream(0); }
  Index deviceCount() const override { return device_count(); }
  Index getCurrentDevice() const override { return current_device(); }
  void setCurrentDevice(Index device) const override { set_device(device); }
  Index exchangeDevice(Index device) const override {
    auto before = current_device();
    if (device >= 0) set_device(device);
    return before;
  }
  Index maybeExchangeDevice(Index device) const override { return exchangeDevice(device); }
  const at::Generator& getDefaultGenerator(Index device) const override { return generators()[known(device)]; }
  at::Generator getNewGenerator(Index device = -1) const override { return at::make_generator<Generator>(known(device)); }
  at::Device getDeviceFromPtr(void* pointer) const override { return {c10::kPrivateUse1, static_cast<Index>(device_of(pointer))}; }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  at::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    TORCH_CHECK(impl->resizable(), "emulated device: the storage is not resizable");
    c10::DeviceGuard guard(impl->device());
    if (bytes == 0) {
      impl->set_data_ptr_noswap(at::DataPtr(nullptr, impl->device()));
    } else {
      auto data = impl->allocator()->allocate(bytes);
      if (size_t kept = impl->data_ptr() ? std::min(static_cast<size_t>(impl->nbytes()), bytes) : 0)
        impl->allocator()->copy_data(data.get(), impl->data_ptr().get(), kept);
      impl->set_data_ptr_noswap(std::move(data));
    }
    impl->set_nbytes(bytes);
  }
};
const bool hooks_are_set = (at::RegisterPrivateUse1HooksInterface(new Hooks), true);

}  // namespace

at::Generator default_generator(int device) { return generators()[known(device)]; }

void bind_streams(pybind11::module& module);
void bind_memory(pybind11::module& module);
void bind_group(pybind11::module& module);
}  // namespace emul

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("device_count", &emul::device_count);
  module.def("current_device", &emul::current_device);
  module.def("set_device", &emul::set_device);
  module.def("synchronize", &emul::synchronize_device);
  module.def("default_generator", &emul::default_generator);
  emul::bind_streams(module);
  emul::bind_memory(module);
  emul::bind_group(module);
}
