// Device memory, pinned memory and copies of the fake ACL runtime. Device addresses are the
// driver's: an access outside a kernel faults.
#include <cstring>
#include <map>

#include "driver.h"

namespace fake_acl {
namespace {

std::mutex mutex;
std::map<const void*, fake::Block*> blocks;
std::map<const void*, fake::PinnedBlock*> pinned_blocks;

template <class Block>
Block* taken(std::map<const void*, Block*>& from, const void* address) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = from.find(address);
  if (found == from.end()) throw std::runtime_error("fake ACL: freed what was never allocated");
  Block* const block = found->second;
  from.erase(found);
  return block;
}

bool is_device(const void* address) { return fake::device_of(address) >= 0; }

// Bytes of this moment for a task that runs later: validated when it is submitted.
char* bytes_of(const void* address) {
  return is_device(address) ? fake::backing(address)
                            : static_cast<char*>(const_cast<void*>(address));
}

void check_kind(const void* to, const void* from, aclrtMemcpyKind kind) {
  const bool to_device = is_device(to), from_device = is_device(from);
  const bool fits = kind == ACL_MEMCPY_DEFAULT ||
                    (kind == ACL_MEMCPY_HOST_TO_DEVICE && to_device && !from_device) ||
                    (kind == ACL_MEMCPY_DEVICE_TO_HOST && !to_device && from_device) ||
                    (kind == ACL_MEMCPY_DEVICE_TO_DEVICE && to_device && from_device) ||
                    (kind == ACL_MEMCPY_HOST_TO_HOST && !to_device && !from_device);
  if (!fits) throw std::runtime_error("fake ACL: a copy's kind is not that of its addresses");
}

void check_size(std::size_t room, std::size_t count) {
  if (count > room) throw std::runtime_error("fake ACL: a copy is larger than its destination");
}

}  // namespace
}  // namespace fake_acl

using fake_acl::answer;

FAKE_ACL_EXPORT aclError aclrtMalloc(void** address, size_t size, aclrtMemMallocPolicy) {
  return answer([&] {
    fake::Block* const block = fake::allocate(fake_acl::current_device(), 0, size);
    *address = block == nullptr ? nullptr : fake::address_of(block);
    const std::lock_guard<std::mutex> lock(fake_acl::mutex);
    if (block != nullptr) fake_acl::blocks[*address] = block;
  });
}

FAKE_ACL_EXPORT aclError aclrtMallocAlign32(void** address, size_t size,
                                            aclrtMemMallocPolicy policy) {
  return aclrtMalloc(address, size, policy);
}

// Waits for the device, as CANN's does: nothing enqueued may still use what is freed.
FAKE_ACL_EXPORT aclError aclrtFree(void* address) {
  return answer([&] {
    if (address == nullptr) return;
    const int device = fake::device_of(address);
    for (fake::Stream* each : fake_acl::streams_on(device)) each->wait_idle();
    fake::deallocate(fake_acl::taken(fake_acl::blocks, address));
    fake_acl::default_stream(device).wait_idle();  // the poison
  });
}

FAKE_ACL_EXPORT aclError aclrtMallocHost(void** address, size_t size) {
  return answer([&] {
    fake::PinnedBlock* const block = fake::allocate_pinned(size);
    *address = fake::address_of(block);
    const std::lock_guard<std::mutex> lock(fake_acl::mutex);
    fake_acl::pinned_blocks[*address] = block;
  });
}

FAKE_ACL_EXPORT aclError aclrtMallocHostWithCfg(void** address, uint64_t size, aclrtMallocConfig*) {
  return aclrtMallocHost(address, size);
}

FAKE_ACL_EXPORT aclError aclrtFreeHost(void* address) {
  return answer([&] { fake::deallocate(fake_acl::taken(fake_acl::pinned_blocks, address)); });
}

FAKE_ACL_EXPORT aclError aclrtPointerGetAttributes(const void* address,
                                                   aclrtPtrAttributes* attributes) {
  const int device = fake::device_of(address);
  std::memset(attributes, 0, sizeof(*attributes));
  attributes->location.type = device >= 0                ? ACL_MEM_LOCATION_TYPE_DEVICE
                              : fake::is_pinned(address) ? ACL_MEM_LOCATION_TYPE_HOST
                                                         : ACL_MEM_LOCATION_TYPE_UNREGISTERED;
  attributes->location.id = device >= 0 ? static_cast<uint32_t>(device) : 0;
  return ACL_SUCCESS;
}

FAKE_ACL_EXPORT aclError aclrtGetMemInfo(aclrtMemAttr, size_t* free, size_t* total) {
  return answer([&] {
    const auto stats = fake::memory_stats(fake_acl::current_device());
    *total = static_cast<size_t>(stats.limit);
    *free = static_cast<size_t>(stats.limit - stats.allocated);
  });
}

// Not in the order of any stream: what is still enqueued has not happened yet.
FAKE_ACL_EXPORT aclError aclrtMemcpy(void* to, size_t room, const void* from, size_t count,
                                     aclrtMemcpyKind kind) {
  return answer([&] {
    fake_acl::check_kind(to, from, kind);
    fake_acl::check_size(room, count);
    fake::count_synchronisation(fake::Counter::blocking_copy);
    std::memcpy(fake_acl::bytes_of(to), fake_acl::bytes_of(from), count);
  });
}

FAKE_ACL_EXPORT aclError aclrtMemcpyAsync(void* to, size_t room, const void* from, size_t count,
                                          aclrtMemcpyKind kind, aclrtStream stream) {
  return answer([&] {
    fake_acl::check_kind(to, from, kind);
    fake_acl::check_size(room, count);
    const bool on_device = fake_acl::is_device(to) && fake_acl::is_device(from);
    char *const target = fake_acl::bytes_of(to), *const source = fake_acl::bytes_of(from);
    fake::count(on_device ? fake::Counter::device_copy : fake::Counter::async_copy);
    fake_acl::stream_of(stream).submit(fake::TaskKind::kernel, "aclrtMemcpyAsync",
                                       [=] { std::memcpy(target, source, count); });
  });
}

FAKE_ACL_EXPORT aclError aclrtMemset(void* address, size_t room, int32_t value, size_t count) {
  return answer([&] {
    fake_acl::check_size(room, count);
    std::memset(fake_acl::bytes_of(address), value, count);
  });
}

FAKE_ACL_EXPORT aclError aclrtMemsetAsync(void* address, size_t room, int32_t value, size_t count,
                                          aclrtStream stream) {
  return answer([&] {
    fake_acl::check_size(room, count);
    char* const target = fake_acl::bytes_of(address);
    fake_acl::stream_of(stream).submit(fake::TaskKind::kernel, "aclrtMemsetAsync",
                                       [=] { std::memset(target, value, count); });
  });
}
