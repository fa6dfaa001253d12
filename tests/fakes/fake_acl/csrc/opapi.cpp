// Arguments and plans of operators of the fake ACL runtime, and their execution on a stream, with
// saturated results on a device that saturates.
#include "opapi.h"

#include <ATen/Parallel.h>
#include <ATen/record_function.h>
#include <dlfcn.h>

#include <cmath>

namespace fake_acl {

at::ScalarType scalar_type(aclDataType dtype) {
  switch (dtype) {
    case ACL_FLOAT: return at::kFloat;
    case ACL_FLOAT16: return at::kHalf;
    case ACL_BF16: return at::kBFloat16;
    case ACL_DOUBLE: return at::kDouble;
    case ACL_INT8: return at::kChar;
    case ACL_INT16: return at::kShort;
    case ACL_INT32: return at::kInt;
    case ACL_INT64: return at::kLong;
    case ACL_UINT8: return at::kByte;
    case ACL_UINT16: return at::kUInt16;
    case ACL_UINT32: return at::kUInt32;
    case ACL_UINT64: return at::kUInt64;
    case ACL_BOOL: return at::kBool;
    case ACL_COMPLEX64: return at::kComplexFloat;
    case ACL_COMPLEX128: return at::kComplexDouble;
    case ACL_FLOAT8_E5M2: return at::kFloat8_e5m2;
    case ACL_FLOAT8_E4M3FN: return at::kFloat8_e4m3fn;
    default: unimplemented("aclDataType", std::to_string(dtype));
  }
}

void put(const at::Tensor& to, const at::Tensor& result) {
  if (!to.defined()) return;
  TORCH_CHECK(to.sizes() == result.sizes(), "a result of ", result.sizes(), " where torch_npu has ",
              to.sizes());
  to.copy_(result);
}

void put(const Tensors& to, const Tensors& results) {
  TORCH_CHECK(to.size() == results.size(), results.size(), " results where torch_npu has ",
              to.size());
  for (std::size_t i = 0; i < to.size(); ++i) put(to[i], results[i]);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> adamw(const at::Tensor& self, const at::Tensor& mean,
                                                     const at::Tensor& square,
                                                     const at::Tensor& grad, const at::Tensor& step,
                                                     const Rates& rates, bool amsgrad,
                                                     bool maximize) {
  TORCH_CHECK(!amsgrad && !maximize, "fake ACL: AdamW without amsgrad and maximize alone");
  const auto done = step.reshape({-1})[0].item<double>() + 1;
  const at::Tensor m = mean.lerp(grad, 1 - rates.beta1);
  const at::Tensor v = square * rates.beta2 + grad * grad * (1 - rates.beta2);
  const at::Tensor scale = (v / (1 - std::pow(rates.beta2, done))).sqrt() + rates.eps;
  const at::Tensor change = m / (1 - std::pow(rates.beta1, done)) / scale;
  return {self * (1 - rates.rate * rates.decay) - change * rates.rate, m, v};
}

int plan(const char* name, uint64_t* workspace, aclOpExecutor** executor, Tensors results,
         std::function<void()> work) {
  *workspace = 0;
  *executor = new aclOpExecutor{name, std::move(work), std::move(results)};
  return 0;
}

namespace {

// In saturation mode an infinity is the largest number, a NaN 0, and either sets the status word.
// That is the vector units' doing, which have no float64.
void saturate(const Tensors& results, int device) {
  for (const at::Tensor& each : results) {
    if (!each.defined() || !at::isFloatingType(each.scalar_type())) continue;
    if (each.element_size() == 1 || each.element_size() == 8) continue;
    if (at::isfinite(each).all().item<bool>()) continue;
    at::nan_to_num_(const_cast<at::Tensor&>(each));
    set_overflow(device);
  }
}

// An OpenMP pool per stream would spin against the host on a small machine; and what observes the
// host's operators sees nothing of the device's insides.
void use_one_thread() {
  thread_local const bool done = [] {
    at::get_num_threads();  // torch's own lazy setting, which would undo ours
    auto* const set = reinterpret_cast<void (*)(int)>(dlsym(RTLD_DEFAULT, "omp_set_num_threads"));
    if (set != nullptr) set(1);
    at::enableRecordFunction(false);
    return true;
  }();
  static_cast<void>(done);
}

}  // namespace

int run(aclOpExecutor* executor, aclrtStream stream) {
  const std::unique_ptr<aclOpExecutor> owned(executor);
  fake::Stream& on = stream_of(stream);
  return answer([&] {
    on.submit(
        fake::TaskKind::kernel, owned->name,
        [work = std::move(owned->work), results = std::move(owned->results), device = on.device()] {
          use_one_thread();
          const at::AutoDispatchBelowADInplaceOrView below;
          try {
            work();
            if (saturates(device)) saturate(results, device);
          } catch (const c10::Error& error) {
            throw std::runtime_error(error.what_without_backtrace());
          }
        });
  });
}

}  // namespace fake_acl

// ---- Arguments
// --------------------------------------------------------------------------------------------------

FAKE_ACL_EXPORT aclTensor* aclCreateTensor(const int64_t* sizes, uint64_t dims, aclDataType dtype,
                                           const int64_t* strides, int64_t offset, aclFormat,
                                           const int64_t*, uint64_t, void* data) {
  const auto type = fake_acl::scalar_type(dtype);
  const at::IntArrayRef shape(sizes, dims), steps(strides, dims);
  char* bytes = nullptr;
  if (c10::multiply_integers(shape) > 0)
    bytes = fake::backing(data) + offset * static_cast<int64_t>(c10::elementSize(type));
  return new aclTensor{at::from_blob(bytes, shape, steps, at::TensorOptions().dtype(type))};
}

FAKE_ACL_EXPORT aclScalar* aclCreateScalar(void* value, aclDataType dtype) {
  const auto type = fake_acl::scalar_type(dtype);
  return new aclScalar{at::from_blob(value, {}, at::TensorOptions().dtype(type)).item()};
}

FAKE_ACL_EXPORT aclIntArray* aclCreateIntArray(const int64_t* values, uint64_t size) {
  return new aclIntArray{std::vector<int64_t>(values, values + size)};
}
FAKE_ACL_EXPORT aclBoolArray* aclCreateBoolArray(const bool* values, uint64_t size) {
  return new aclBoolArray{std::vector<uint8_t>(values, values + size)};
}
FAKE_ACL_EXPORT aclFloatArray* aclCreateFloatArray(const float* values, uint64_t size) {
  return new aclFloatArray{std::vector<float>(values, values + size)};
}
FAKE_ACL_EXPORT aclTensorList* aclCreateTensorList(const aclTensor* const* tensors, uint64_t size) {
  return new aclTensorList{std::vector<const aclTensor*>(tensors, tensors + size)};
}
FAKE_ACL_EXPORT aclScalarList* aclCreateScalarList(const aclScalar* const* all, uint64_t size) {
  return new aclScalarList{std::vector<const aclScalar*>(all, all + size)};
}

FAKE_ACL_EXPORT int aclDestroyTensor(const aclTensor* made) { return delete made, 0; }
FAKE_ACL_EXPORT int aclDestroyScalar(const aclScalar* made) { return delete made, 0; }
FAKE_ACL_EXPORT int aclDestroyIntArray(const aclIntArray* made) { return delete made, 0; }
FAKE_ACL_EXPORT int aclDestroyBoolArray(const aclBoolArray* made) { return delete made, 0; }
FAKE_ACL_EXPORT int aclDestroyFloatArray(const aclFloatArray* made) { return delete made, 0; }
FAKE_ACL_EXPORT int aclDestroyTensorList(const aclTensorList* made) {
  for (const aclTensor* each : made->tensors) delete each;
  return delete made, 0;
}
FAKE_ACL_EXPORT int aclDestroyScalarList(const aclScalarList* made) {
  for (const aclScalar* each : made->scalars) delete each;
  return delete made, 0;
}
