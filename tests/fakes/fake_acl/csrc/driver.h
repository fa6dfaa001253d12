// Declarations shared by the files of the fake ACL runtime: the fake accelerator's driver under
// CANN's names.
#pragma once

#include <acl/acl.h>

#include <exception>
#include <string>
#include <vector>

#include "runtime.h"

#define FAKE_ACL_EXPORT extern "C" __attribute__((visibility("default")))

namespace fake_acl {

// Streams are the driver's, but not out of its pool: torch_npu makes more than that has.
fake::Stream& stream_of(aclrtStream stream);
std::vector<fake::Stream*> streams_on(int device);
// The calling thread's; an error where it has set none, as CANN's is.
int current_device();
fake::Stream& default_stream(int device);

// What aclGetRecentErrMsg() says.
void note_error(const std::string& message);

[[noreturn]] void unimplemented(const char* name, const std::string& what = "");

bool saturates(int device);
// In the order of the stream, of a kernel that is running.
void set_overflow(int device);

// Runs `work` and gives an error code for what it throws.
template <class Work>
aclError answer(Work work) {
  try {
    work();
    return ACL_SUCCESS;
  } catch (const fake::OutOfMemory& error) {
    note_error(error.what());
    return ACL_ERROR_RT_MEMORY_ALLOCATION;
  } catch (const std::exception& error) {
    note_error(error.what());
    return ACL_ERROR_RT_INTERNAL_ERROR;
  }
}

}  // namespace fake_acl
