// The PrivateUse1 interfaces besides ops: allocators, device and stream guard, events, generator,
// hooks.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstring>

#include "launch.h"
#include "runtime.h"

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;

constexpr DeviceType kType = DeviceType::PrivateUse1;

fake::Stream& stream_of(const c10::Stream& stream) {
  return fake::stream(stream.device_index(), static_cast<int>(stream.id()));
}

c10::Stream stream_handle(DeviceIndex device, int id) {
  return c10::Stream(c10::Stream::UNSAFE, Device(kType, device), id);
}

DeviceIndex index_or_current(Device device) {
  return device.has_index() ? device.index() : static_cast<DeviceIndex>(fake::current_device());
}

// ---- Allocators
// -----------------------------------------------------------------------------------------------

struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(std::size_t bytes) override {
    const int device = fake::current_device();
    try {
      fake::Block* const block = fake::allocate(device, fake::current_stream(device), bytes);
      void* const address = block == nullptr ? nullptr : fake::address_of(block);
      return {address, block, &release, Device(kType, static_cast<DeviceIndex>(device))};
    } catch (const fake::OutOfMemory& error) {
      TORCH_CHECK_WITH(OutOfMemoryError, false, error.what());
    }
  }
  static void release(void* block) {
    if (block != nullptr) fake::deallocate(static_cast<fake::Block*>(block));
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return nullptr;
  }  // an address alone doesn't name its block
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    if (bytes == 0) return;
    const int device = fake::device_of(to);
    char* const target = fake::backing(to);
    const char* const source = fake::backing(from);
    fake::stream(device, fake::current_stream(device))
        .submit(fake::TaskKind::kernel, "copy_data", [=] { std::memcpy(target, source, bytes); });
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t /*pool*/ = {0, 0}) override {
    for (int device = 0; device < fake::kDevices; ++device) fake::empty_cache(device);
  }
  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    if (pointer.get() == nullptr) return;
    TORCH_CHECK(pointer.get_deleter() == &release,
                "fake device: record_stream on memory of another allocator");
    fake::record_use(static_cast<fake::Block*>(pointer.get_context()),
                     static_cast<int>(stream.id()));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
    const fake::MemoryStats now = fake::memory_stats(device);
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0].current = now.allocated;
    stats.allocated_bytes[0].peak = now.allocated_peak;
    stats.reserved_bytes[0].current = now.reserved;
    stats.reserved_bytes[0].peak = now.reserved_peak;
    return stats;
  }
  void resetAccumulatedStats(DeviceIndex /*device*/) override {}
  void resetPeakStats(DeviceIndex device) override { fake::reset_peaks(device); }
};

struct PinnedMemory final : at::HostAllocator {
  c10::DataPtr allocate(std::size_t bytes) override {
    fake::PinnedBlock* const block = fake::allocate_pinned(bytes);
    void* const address = block == nullptr ? nullptr : fake::address_of(block);
    return {address, block, &release, Device(DeviceType::CPU)};
  }
  static void release(void* block) {
    if (block != nullptr) fake::deallocate(static_cast<fake::PinnedBlock*>(block));
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
  bool record_event(void* pointer, void* /*context*/, c10::Stream stream) override {
    return fake::record_pinned_use(pointer, stream_of(stream));
  }
  void empty_cache() override {}
  at::HostStats get_stats() override {
    TORCH_CHECK_NOT_IMPLEMENTED(false, "fake device: pinned memory statistics");
  }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

DeviceMemory device_memory;
PinnedMemory pinned_memory;
REGISTER_ALLOCATOR(kType, &device_memory)
REGISTER_HOST_ALLOCATOR(kType, &pinned_memory)

// ---- Devices, streams, events
// ---------------------------------------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return kType; }
  Device exchangeDevice(Device device) const override {
    const Device before = getDevice();
    setDevice(device);
    return before;
  }
  Device getDevice() const override {
    return {kType, static_cast<DeviceIndex>(fake::current_device())};
  }
  void setDevice(Device device) const override {
    fake::set_current_device(index_or_current(device));
  }
  void uncheckedSetDevice(Device device) const noexcept override { setDevice(device); }
  DeviceIndex deviceCount() const noexcept override { return fake::kDevices; }

  c10::Stream getStream(Device device) const override {
    const DeviceIndex index = index_or_current(device);
    return stream_handle(index, fake::current_stream(index));
  }
  c10::Stream getDefaultStream(Device device) const override {
    return stream_handle(index_or_current(device), 0);
  }
  c10::Stream getStreamFromGlobalPool(Device device,
                                      bool /*high_priority*/ = false) const override {
    return getNewStream(device, 0);
  }
  c10::Stream getNewStream(Device device, int /*priority*/ = 0) const override {
    const DeviceIndex index = index_or_current(device);
    return stream_handle(index, fake::next_pool_stream(index));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::Stream before = getStream(stream.device());
    fake::set_current_stream(stream.device_index(), static_cast<int>(stream.id()));
    return before;
  }
  bool queryStream(const c10::Stream& stream) const override {
    fake::count(fake::Counter::stream_query);
    fake::check_not_capturing("a stream was queried");
    fake::check_device_lost(stream.device_index());
    return stream_of(stream).idle();
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    fake::count_synchronisation(fake::Counter::stream_synchronize);
    stream_of(stream).wait_idle();
  }
  void synchronizeDevice(const DeviceIndex device) const override {
    fake::count_synchronisation(fake::Counter::device_synchronize);
    fake::synchronize_device(device);
  }
#if __has_include(<c10/core/DeviceCapability.h>)
  c10::DeviceCapability getDeviceCapability(Device /*device*/) const override { return {}; }
#endif
#ifdef FAKE_HAS_NATIVE_HANDLE
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return &stream_of(stream);
  }
#endif

  void record(void** event, const c10::Stream& stream, const DeviceIndex device,
              const c10::EventFlag flag) const override {
    TORCH_CHECK(device == -1 || device == stream.device_index(),
                "fake device: the event is of another device");
    if (*event == nullptr) *event = new fake::Event;
    auto* const mine = static_cast<fake::Event*>(*event);
    mine->timing = flag == c10::EventFlag::BACKEND_DEFAULT;
    fake::record(*mine, stream_of(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) fake::wait(*static_cast<fake::Event*>(event), stream_of(stream));
  }
  bool queryEvent(void* event) const override {
    fake::count(fake::Counter::event_query);
    fake::check_not_capturing("an event was queried");
    if (event == nullptr) return true;
    const auto& mine = *static_cast<fake::Event*>(event);
    if (!mine.last) return true;
    fake::require_current(mine.device, "a query of an event");
    fake::check_device_lost(mine.device);
    return mine.last->query();
  }
  void synchronizeEvent(void* event) const override {
    fake::count_synchronisation(fake::Counter::event_synchronize);
    if (event == nullptr) return;
    auto* const mine = static_cast<fake::Event*>(event);
    if (!mine->last) return;
    fake::require_current(mine->device, "a wait for an event");
    mine->last->wait_on_host();
    fake::check_device_error(mine->device);
  }
  void destroyEvent(void* event, const DeviceIndex /*device*/) const noexcept override {
    delete static_cast<fake::Event*>(event);
  }
  double elapsedTime(void* start, void* end, const DeviceIndex /*device*/) const override {
    TORCH_CHECK(start != nullptr && end != nullptr,
                "fake device: both events must be recorded first");
    return fake::elapsed_ms(*static_cast<fake::Event*>(start), *static_cast<fake::Event*>(end));
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer,
                             const c10::Stream& stream) const override {
    device_memory.recordStream(pointer, stream);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// ---- Generators
// -----------------------------------------------------------------------------------------------

// The state is a CPU generator's and lives on the host, as CUDA's seed and offset do: random
// numbers are drawn when an op is launched. So seeding and reading the state never wait, and the
// numbers are those of a CPU run.
struct Generator final : c10::GeneratorImpl {
  Generator(DeviceIndex device, at::Generator state)
      : GeneratorImpl(Device(kType, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        inner(std::move(state)) {}
  void set_current_seed(std::uint64_t seed) override { inner.set_current_seed(seed); }
  void set_offset(std::uint64_t /*offset*/) override {
    TORCH_CHECK_NOT_IMPLEMENTED(false, "fake device: generator offsets");
  }
  std::uint64_t get_offset() const override {
    TORCH_CHECK_NOT_IMPLEMENTED(false, "fake device: generator offsets");
  }
  std::uint64_t current_seed() const override { return inner.current_seed(); }
  std::uint64_t seed() override { return inner.seed(); }
  void set_state(const c10::TensorImpl& state) override {
    inner.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return inner.unsafeGetGeneratorImpl()->get_state();
  }
  Generator* clone_impl() const override { return new Generator(device().index(), inner.clone()); }

  at::Generator inner;
};

at::Generator new_generator(DeviceIndex device) {
  const auto index = device < 0 ? static_cast<DeviceIndex>(fake::current_device()) : device;
  return at::make_generator<Generator>(index, at::detail::createCPUGenerator());
}

const at::Generator& default_generator(DeviceIndex device) {
  static const std::array<at::Generator, fake::kDevices> generators = {new_generator(0),
                                                                       new_generator(1)};
  const int index = device < 0 ? fake::current_device() : device;
  TORCH_CHECK(index < fake::kDevices, "fake device: no device ", index);
  return generators[index];
}

// ---- Hooks
// ----------------------------------------------------------------------------------------------------

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex /*device*/) const override { return true; }
  void init() const override {}
  DeviceIndex deviceCount() const override { return fake::kDevices; }
  void setCurrentDevice(DeviceIndex device) const override { fake::set_current_device(device); }
  DeviceIndex getCurrentDevice() const override {
    return static_cast<DeviceIndex>(fake::current_device());
  }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    const DeviceIndex before = getCurrentDevice();
    fake::set_current_device(device);
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return device < 0 ? getCurrentDevice() : exchangeDevice(device);
  }
  bool isPinnedPtr(const void* data) const override { return fake::is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  Device getDeviceFromPtr(void* data) const override {
    const int device = fake::device_of(data);
    TORCH_CHECK(device >= 0, "fake device: not device memory");
    return {kType, static_cast<DeviceIndex>(device)};
  }
  const at::Generator& getDefaultGenerator(DeviceIndex device) const override {
    return default_generator(device);
  }
  at::Generator getNewGenerator(DeviceIndex device = -1) const override {
    return new_generator(device);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, std::size_t bytes) const override {
    c10::DeviceGuard guard(storage.device());
    c10::DataPtr fresh = device_memory.allocate(bytes);
    device_memory.copy_data(fresh.get(), storage.data(), std::min(bytes, storage.nbytes()));
    storage.set_data_ptr_noswap(std::move(fresh));
    storage.set_nbytes(bytes);
  }
};

const bool hooks_registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

}  // namespace

at::Generator fake::cpu_generator(const std::optional<at::Generator>& given, c10::Device device) {
  const at::Generator chosen =
      given.has_value() && given->defined() ? *given : default_generator(device.index());
  TORCH_CHECK(chosen.device().type() == kType && chosen.device() == device,
              "fake device: expected a generator of ", device, ", got one of ", chosen.device());
  return static_cast<Generator*>(chosen.unsafeGetGeneratorImpl())->inner;
}
