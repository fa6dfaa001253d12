// The overflow mode of the fake ACL runtime, its status word, and the operators that torch_npu
// reads and clears it with, compiled ones of the old interface. No other operator of that interface
// is there.
#include <acl/acl_op_compiler.h>

#include <array>
#include <atomic>
#include <cstring>

#include "driver.h"

struct aclTensorDesc {
  aclDataType dtype;
  std::vector<int64_t> sizes;
  aclFormat format;
};
struct aclDataBuffer {
  void* data;
  std::size_t size;
};
struct aclopAttr {};

namespace fake_acl {
namespace {

// Before anyone has set one it is the chip's own: the first ones know only one.
int mode_of_chip() {
  const std::string name = aclrtGetSocName();
  const bool is_first = name == "Ascend910A" || name.rfind("Ascend310P", 0) == 0;
  return is_first ? ACL_RT_OVERFLOW_MODE_SATURATION : ACL_RT_OVERFLOW_MODE_INFNAN;
}

std::array<std::atomic<int>, fake::kDevices> modes{mode_of_chip(), mode_of_chip()};
std::array<std::atomic<int>, fake::kDevices> words{};

// In the order of the stream: the word in the first of `count` numbers of a type, the rest 0.
template <class Number>
void read_word(void* address, std::size_t bytes, fake::Stream& stream) {
  char* const target = fake::backing(address);
  stream.submit(fake::TaskKind::kernel, "overflow status", [=, device = stream.device()] {
    const Number word = static_cast<Number>(words[device].load());
    std::memset(target, 0, bytes);
    std::memcpy(target, &word, sizeof(word));
  });
}

void clear_word(fake::Stream& stream) {
  stream.submit(fake::TaskKind::kernel, "clear overflow status",
                [device = stream.device()] { words[device] = 0; });
}

}  // namespace

bool saturates(int device) { return modes[device] == ACL_RT_OVERFLOW_MODE_SATURATION; }
void set_overflow(int device) { words[device] = 1; }

}  // namespace fake_acl

using fake_acl::answer;

FAKE_ACL_EXPORT aclError aclrtSetDeviceSatMode(aclrtFloatOverflowMode mode) {
  return answer([&] { fake_acl::modes[fake_acl::current_device()] = mode; });
}

FAKE_ACL_EXPORT aclError aclrtGetDeviceSatMode(aclrtFloatOverflowMode* mode) {
  return answer([&] {
    *mode = static_cast<aclrtFloatOverflowMode>(fake_acl::modes[fake_acl::current_device()].load());
  });
}

FAKE_ACL_EXPORT aclError aclrtSetStreamOverflowSwitch(aclrtStream, uint32_t) { return ACL_SUCCESS; }

FAKE_ACL_EXPORT aclError aclrtGetOverflowStatus(void* address, size_t size, aclrtStream stream) {
  return answer([&] { fake_acl::read_word<int32_t>(address, size, fake_acl::stream_of(stream)); });
}

FAKE_ACL_EXPORT aclError aclrtResetOverflowStatus(aclrtStream stream) {
  return answer([&] { fake_acl::clear_word(fake_acl::stream_of(stream)); });
}

FAKE_ACL_EXPORT void fake_acl_set_overflow(int device) { fake_acl::set_overflow(device); }

// ---- Operators of the old interface
// -----------------------------------------------------------------------------

FAKE_ACL_EXPORT aclError aclSetCompileopt(aclCompileOpt, const char*) { return ACL_SUCCESS; }
FAKE_ACL_EXPORT size_t aclGetCompileoptSize(aclCompileOpt) { return 64; }
FAKE_ACL_EXPORT aclError aclGetCompileopt(aclCompileOpt, char* value, size_t length) {
  std::strncpy(value, "disable", length);
  return ACL_SUCCESS;
}

FAKE_ACL_EXPORT aclTensorDesc* aclCreateTensorDesc(aclDataType dtype, int count,
                                                   const int64_t* sizes, aclFormat format) {
  return new aclTensorDesc{dtype, std::vector<int64_t>(sizes, sizes + count), format};
}
FAKE_ACL_EXPORT void aclDestroyTensorDesc(const aclTensorDesc* made) { delete made; }
FAKE_ACL_EXPORT aclError aclSetTensorFormat(aclTensorDesc*, aclFormat) { return ACL_SUCCESS; }
FAKE_ACL_EXPORT aclError aclSetTensorShape(aclTensorDesc*, int, const int64_t*) {
  return ACL_SUCCESS;
}
FAKE_ACL_EXPORT aclError aclSetTensorPlaceMent(aclTensorDesc*, aclMemType) { return ACL_SUCCESS; }
FAKE_ACL_EXPORT void aclSetTensorDescName(aclTensorDesc*, const char*) {}
FAKE_ACL_EXPORT aclDataBuffer* aclCreateDataBuffer(void* data, size_t size) {
  return new aclDataBuffer{data, size};
}
FAKE_ACL_EXPORT aclError aclDestroyDataBuffer(const aclDataBuffer* made) {
  delete made;
  return ACL_SUCCESS;
}
FAKE_ACL_EXPORT aclopAttr* aclopCreateAttr() { return new aclopAttr; }
FAKE_ACL_EXPORT void aclopDestroyAttr(const aclopAttr* made) { delete made; }
// Of an operator that names itself when it is run.
FAKE_ACL_EXPORT aclError aclopSetAttrBool(aclopAttr*, const char*, uint8_t) { return ACL_SUCCESS; }
FAKE_ACL_EXPORT aclError aclopSetAttrInt(aclopAttr*, const char*, int64_t) { return ACL_SUCCESS; }
FAKE_ACL_EXPORT aclError aclopSetAttrFloat(aclopAttr*, const char*, float) { return ACL_SUCCESS; }
FAKE_ACL_EXPORT aclError aclopSetAttrString(aclopAttr*, const char*, const char*) {
  return ACL_SUCCESS;
}
FAKE_ACL_EXPORT aclError aclopSetAttrListInt(aclopAttr*, const char*, int, const int64_t*) {
  return ACL_SUCCESS;
}

FAKE_ACL_EXPORT aclError aclopCompileAndExecute(const char* name, int, const aclTensorDesc* const*,
                                                const aclDataBuffer* const* inputs, int outputs,
                                                const aclTensorDesc* const* descriptions,
                                                aclDataBuffer* const* results, const aclopAttr*,
                                                aclopEngineType, aclopCompileType, const char*,
                                                aclrtStream stream) {
  const std::string said = name;
  fake::Stream& on = fake_acl::stream_of(stream);
  return answer([&] {
    if (said == "NPUGetFloatStatusV2" && outputs == 1 && descriptions[0]->dtype == ACL_INT32)
      fake_acl::read_word<int32_t>(results[0]->data, results[0]->size, on);
    else if (said == "NPUGetFloatStatus")  // a 910 writes to what it is given
      fake_acl::read_word<float>(inputs[0]->data, inputs[0]->size, on);
    else if (said == "NPUClearFloatStatusV2" || said == "NPUClearFloatStatus")
      fake_acl::clear_word(on);
    else
      fake_acl::unimplemented("aclopCompileAndExecute", said);
  });
}
