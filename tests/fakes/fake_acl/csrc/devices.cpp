// Devices, contexts, streams and events of the fake ACL runtime.
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "driver.h"

namespace fake_acl {
namespace {

struct Globals {  // leaked: worker threads may outlive static destruction
  std::mutex mutex;
  std::vector<std::unique_ptr<fake::Stream>> streams;
  std::map<aclSysParamOpt, int64_t> options;
  std::array<std::atomic<bool>, fake::kDevices> has_context{};
  std::string error;
  bool is_initialised = false;
};

Globals& globals() {
  static Globals* const instance = new Globals;
  return *instance;
}

thread_local int device_now = -1;

fake::Stream* new_stream(int device) {
  Globals& g = globals();
  const std::lock_guard<std::mutex> lock(g.mutex);
  // Numbers of this runtime's own streams begin where those of the driver's pool end.
  const int id = fake::kStreams + static_cast<int>(g.streams.size());
  g.streams.push_back(std::make_unique<fake::Stream>(device, id));
  return g.streams.back().get();
}

void require_device(int device) {
  if (device < 0 || device >= fake::kDevices)
    throw std::runtime_error("fake ACL: there are devices 0 and 1, not " + std::to_string(device));
}

void stop_streams() {
  for (int device = 0; device < fake::kDevices; ++device)
    for (fake::Stream* each : streams_on(device)) each->release();
  for (int device = 0; device < fake::kDevices; ++device)
    for (fake::Stream* each : streams_on(device)) each->stop();
  fake::shutdown();
}

}  // namespace

fake::Stream& stream_of(aclrtStream stream) {
  return stream == nullptr ? default_stream(current_device()) : *static_cast<fake::Stream*>(stream);
}

std::vector<fake::Stream*> streams_on(int device) {
  Globals& g = globals();
  const std::lock_guard<std::mutex> lock(g.mutex);
  std::vector<fake::Stream*> found;
  for (auto& each : g.streams)
    if (each->device() == device) found.push_back(each.get());
  return found;
}

int current_device() {
  if (device_now < 0) throw std::runtime_error("fake ACL: this thread has set no device");
  return device_now;
}

fake::Stream& default_stream(int device) { return fake::stream(device, 0); }

void note_error(const std::string& message) {
  Globals& g = globals();
  const std::lock_guard<std::mutex> lock(g.mutex);
  g.error = message;
}

void unimplemented(const char* name, const std::string& what) {
  std::fprintf(stderr, "fake ACL: %s%s%s is not implemented (tests/fakes/fake_acl)\n", name,
               what.empty() ? "" : ": ", what.c_str());
  std::fflush(stderr);
  std::abort();
}

}  // namespace fake_acl

using fake_acl::answer;
using fake_acl::stream_of;

// ---- The process
// ------------------------------------------------------------------------------------------------

FAKE_ACL_EXPORT aclError aclInit(const char*) {
  auto& g = fake_acl::globals();
  const std::lock_guard<std::mutex> lock(g.mutex);
  if (g.is_initialised) return ACL_ERROR_REPEAT_INITIALIZE;
  g.is_initialised = true;
  std::atexit(fake_acl::stop_streams);
  return ACL_SUCCESS;
}

FAKE_ACL_EXPORT aclError aclFinalize() { return ACL_SUCCESS; }

FAKE_ACL_EXPORT const char* aclGetRecentErrMsg() {
  thread_local std::string message;
  auto& g = fake_acl::globals();
  const std::lock_guard<std::mutex> lock(g.mutex);
  message.swap(g.error);
  g.error.clear();
  return message.empty() ? nullptr : message.c_str();
}

FAKE_ACL_EXPORT void aclAppLog(aclLogLevel, const char*, const char*, uint32_t, const char*, ...) {}

FAKE_ACL_EXPORT const char* aclrtGetSocName() {
  const char* const name = std::getenv("FAKE_ACL_SOC");
  return name == nullptr ? "Ascend910B1" : name;
}

// From 9.0 on torch_npu takes norms of any order to the operators of operators.txt.
FAKE_ACL_EXPORT aclError aclsysGetCANNVersion(aclCANNPackageName, aclCANNPackageVersion* version) {
  std::memset(version, 0, sizeof(*version));
  std::strcpy(version->version, "9.0.0");
  return ACL_SUCCESS;
}

// ---- Devices
// ----------------------------------------------------------------------------------------------------

FAKE_ACL_EXPORT aclError aclrtGetDeviceCount(uint32_t* count) {
  *count = fake::kDevices;
  return ACL_SUCCESS;
}

FAKE_ACL_EXPORT aclError aclrtSetDevice(int32_t device) {
  return answer([&] {
    fake_acl::require_device(device);
    fake_acl::device_now = device;
    fake_acl::globals().has_context[device] = true;
    fake::set_current_device(device);
  });
}

FAKE_ACL_EXPORT aclError aclrtGetDevice(int32_t* device) {
  if (fake_acl::device_now < 0) return ACL_ERROR_RT_CONTEXT_NULL;
  *device = fake_acl::device_now;
  return ACL_SUCCESS;
}

FAKE_ACL_EXPORT aclError aclrtResetDevice(int32_t) { return ACL_SUCCESS; }

// A context is a device: this runtime has no others.
FAKE_ACL_EXPORT aclError aclrtGetCurrentContext(aclrtContext* context) {
  if (fake_acl::device_now < 0) return ACL_ERROR_RT_CONTEXT_NULL;
  *context = reinterpret_cast<aclrtContext>(static_cast<intptr_t>(fake_acl::device_now + 1));
  return ACL_SUCCESS;
}

FAKE_ACL_EXPORT aclError aclrtSetCurrentContext(aclrtContext context) {
  return aclrtSetDevice(static_cast<int32_t>(reinterpret_cast<intptr_t>(context) - 1));
}

FAKE_ACL_EXPORT aclError aclrtGetPrimaryCtxState(int32_t device, uint32_t*, int32_t* active) {
  return answer([&] {
    fake_acl::require_device(device);
    *active = fake_acl::globals().has_context[device] ? 1 : 0;
  });
}

// Of cores and caches there are none to report.
FAKE_ACL_EXPORT aclError aclGetDeviceCapability(uint32_t device, aclDeviceInfo, int64_t* value) {
  return answer([&] {
    fake_acl::require_device(static_cast<int32_t>(device));
    *value = 0;
  });
}

FAKE_ACL_EXPORT aclError aclrtDeviceCanAccessPeer(int32_t* can, int32_t, int32_t) {
  *can = 0;
  return ACL_SUCCESS;
}

FAKE_ACL_EXPORT aclError aclrtSynchronizeDevice() {
  return answer([] {
    const int device = fake_acl::current_device();
    fake::count_synchronisation(fake::Counter::device_synchronize);
    for (fake::Stream* each : fake_acl::streams_on(device)) each->wait_idle();
    fake::synchronize_device(device);
  });
}

FAKE_ACL_EXPORT aclError aclrtSynchronizeDeviceWithTimeout(int32_t) {
  return aclrtSynchronizeDevice();
}

// How long an operator may take: nothing of this runtime's.
FAKE_ACL_EXPORT aclError aclrtSetOpExecuteTimeOut(uint32_t) { return ACL_SUCCESS; }
FAKE_ACL_EXPORT aclError aclrtSetOpWaitTimeout(uint32_t) { return ACL_SUCCESS; }

// Such as whether results have to be the same from run to run: those of this runtime are.
FAKE_ACL_EXPORT aclError aclrtSetSysParamOpt(aclSysParamOpt option, int64_t value) {
  auto& g = fake_acl::globals();
  const std::lock_guard<std::mutex> lock(g.mutex);
  g.options[option] = value;
  return ACL_SUCCESS;
}

FAKE_ACL_EXPORT aclError aclrtGetSysParamOpt(aclSysParamOpt option, int64_t* value) {
  auto& g = fake_acl::globals();
  const std::lock_guard<std::mutex> lock(g.mutex);
  *value = g.options[option];
  return ACL_SUCCESS;
}

FAKE_ACL_EXPORT aclError aclrtCtxSetSysParamOpt(aclSysParamOpt option, int64_t value) {
  return aclrtSetSysParamOpt(option, value);
}

// ---- Streams
// ----------------------------------------------------------------------------------------------------

FAKE_ACL_EXPORT aclError aclrtCreateStream(aclrtStream* stream) {
  return answer([&] { *stream = fake_acl::new_stream(fake_acl::current_device()); });
}

FAKE_ACL_EXPORT aclError aclrtCreateStreamWithConfig(aclrtStream* stream, uint32_t, uint32_t) {
  return aclrtCreateStream(stream);
}

// They live as long as the process: a test may still look at one.
FAKE_ACL_EXPORT aclError aclrtDestroyStream(aclrtStream) { return ACL_SUCCESS; }
FAKE_ACL_EXPORT aclError aclrtDestroyStreamForce(aclrtStream) { return ACL_SUCCESS; }

FAKE_ACL_EXPORT aclError aclrtSynchronizeStream(aclrtStream stream) {
  return answer([&] {
    fake::count_synchronisation(fake::Counter::stream_synchronize);
    stream_of(stream).wait_idle();
  });
}

FAKE_ACL_EXPORT aclError aclrtSynchronizeStreamWithTimeout(aclrtStream stream, int32_t) {
  return aclrtSynchronizeStream(stream);
}

FAKE_ACL_EXPORT aclError aclrtStreamQuery(aclrtStream stream, aclrtStreamStatus* status) {
  return answer([&] {
    fake::count(fake::Counter::stream_query);
    *status = stream_of(stream).idle() ? ACL_STREAM_STATUS_COMPLETE : ACL_STREAM_STATUS_NOT_READY;
  });
}

FAKE_ACL_EXPORT aclError aclrtStreamGetId(aclrtStream stream, int32_t* id) {
  return answer([&] { *id = stream_of(stream).id(); });
}

FAKE_ACL_EXPORT aclError aclrtSetStreamFailureMode(aclrtStream, uint64_t) { return ACL_SUCCESS; }

FAKE_ACL_EXPORT aclError aclrtStreamWaitEvent(aclrtStream stream, aclrtEvent event) {
  return answer([&] { fake::wait(*static_cast<fake::Event*>(event), stream_of(stream)); });
}

// ---- Events
// -----------------------------------------------------------------------------------------------------

FAKE_ACL_EXPORT aclError aclrtCreateEventExWithFlag(aclrtEvent* event, uint32_t flag) {
  auto* const made = new fake::Event;
  made->timing = (flag & ACL_EVENT_TIME_LINE) != 0;
  *event = made;
  return ACL_SUCCESS;
}

FAKE_ACL_EXPORT aclError aclrtCreateEventWithFlag(aclrtEvent* event, uint32_t flag) {
  return aclrtCreateEventExWithFlag(event, flag);
}

FAKE_ACL_EXPORT aclError aclrtDestroyEvent(aclrtEvent event) {
  delete static_cast<fake::Event*>(event);
  return ACL_SUCCESS;
}

FAKE_ACL_EXPORT aclError aclrtRecordEvent(aclrtEvent event, aclrtStream stream) {
  return answer([&] { fake::record(*static_cast<fake::Event*>(event), stream_of(stream)); });
}

FAKE_ACL_EXPORT aclError aclrtQueryEventStatus(aclrtEvent event, aclrtEventRecordedStatus* status) {
  fake::count(fake::Counter::event_query);
  const auto last = static_cast<fake::Event*>(event)->last;
  *status = last == nullptr || last->query() ? ACL_EVENT_RECORDED_STATUS_COMPLETE
                                             : ACL_EVENT_RECORDED_STATUS_NOT_READY;
  return ACL_SUCCESS;
}

FAKE_ACL_EXPORT aclError aclrtSynchronizeEvent(aclrtEvent event) {
  return answer([&] {
    fake::count_synchronisation(fake::Counter::event_synchronize);
    const auto last = static_cast<fake::Event*>(event)->last;
    if (last != nullptr) last->wait_on_host();
  });
}

FAKE_ACL_EXPORT aclError aclrtEventElapsedTime(float* ms, aclrtEvent start, aclrtEvent end) {
  return answer([&] {
    *ms = static_cast<float>(
        fake::elapsed_ms(*static_cast<fake::Event*>(start), *static_cast<fake::Event*>(end)));
  });
}

// ---- For tests, through ctypes
// ----------------------------------------------------------------------------------

FAKE_ACL_EXPORT int fake_acl_counter(int index, char* name, std::size_t size, int64_t* value) {
  if (index < 0 || index >= fake::kCounters) return 0;
  const auto counter = static_cast<fake::Counter>(index);
  std::strncpy(name, fake::name_of(counter), size - 1);
  *value = 0;
  for (auto& [thread, counts] : fake::counts_by_thread()) *value += counts[index];
  return fake::is_synchronisation(counter) ? 2 : 1;
}

FAKE_ACL_EXPORT void fake_acl_hold(int device) {
  for (fake::Stream* each : fake_acl::streams_on(device)) each->hold();
}

FAKE_ACL_EXPORT void fake_acl_release(int device) {
  for (fake::Stream* each : fake_acl::streams_on(device)) each->release();
}
