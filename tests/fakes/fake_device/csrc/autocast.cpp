// torch.autocast on the device, with torch's own lists of what runs in which precision. Kernels are
// boxed, one for each precision: torch's templates, of which every operator has its own, take
// longer to compile than all else here. build.py takes the lists out of ATen/autocast_mode.h, which
// includes the headers of all operators.
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <autocast_lists.h>
#include <torch/library.h>

#include <string>
#include <vector>

namespace at::autocast {

// As ATen/autocast_mode.h declares them.
TORCH_API ScalarType get_autocast_dtype(DeviceType device);
TORCH_API Tensor cached_cast(ScalarType dtype, const Tensor& tensor, DeviceType device);

namespace {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;

enum class Precision { lower, float32, float32_result, widest };

bool is_cast(const Tensor& tensor) {
  return tensor.defined() && tensor.is_privateuseone() && tensor.is_floating_point() &&
         tensor.scalar_type() != kDouble;
}

ScalarType wider(ScalarType dtype, const Tensor& tensor) {
  if (!is_cast(tensor)) return dtype;
  TORCH_CHECK(tensor.scalar_type() == kFloat || tensor.scalar_type() == dtype || dtype == kFloat,
              "autocast: tensors of ", tensor.scalar_type(), " and ", dtype);
  return tensor.scalar_type() == kFloat ? kFloat : dtype;
}

// The dtype of the arguments that are cast. An optional tensor has no say, as in torch's templates.
ScalarType target(Precision precision, const std::vector<c10::Argument>& arguments,
                  const c10::IValue* values) {
  if (precision == Precision::float32) return kFloat;
  ScalarType dtype = get_autocast_dtype(kDevice);
  for (size_t i = 0; precision == Precision::widest && i < arguments.size(); ++i) {
    if (values[i].isTensorList()) {
      for (const Tensor& tensor : values[i].toTensorVector()) dtype = wider(dtype, tensor);
    } else if (values[i].isTensor() && arguments[i].type()->kind() == c10::TypeKind::TensorType) {
      dtype = wider(dtype, values[i].toTensor());
    }
  }
  return dtype;
}

template <Precision precision>
void boxed(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard excluded(
      c10::DispatchKeySet(c10::DispatchKey::AutocastPrivateUse1));
  const auto& arguments = op.schema().arguments();
  c10::IValue* values = stack->data() + stack->size() - arguments.size();
  if constexpr (precision == Precision::float32_result) {
    for (size_t i = 0; is_cast(values[0].toTensor()) && i < arguments.size(); ++i) {
      if (arguments[i].name() == "dtype" && values[i].isNone()) values[i] = kFloat;
    }
  } else {
    const ScalarType dtype = target(precision, arguments, values);
    for (size_t i = 0; i < arguments.size(); ++i) {
      if (values[i].isTensor()) {
        values[i] = cached_cast(dtype, values[i].toTensor(), kDevice);
      } else if (values[i].isTensorList()) {
        std::vector<Tensor> tensors = values[i].toTensorVector();
        for (Tensor& tensor : tensors) tensor = cached_cast(dtype, tensor, kDevice);
        values[i] = std::move(tensors);
      }
    }
  }
  op.callBoxed(stack);
}

// "softmax, int" is softmax.int.
std::string operator_name(std::string text) {
  const size_t comma = text.find(", ");
  return comma == std::string::npos ? text : text.replace(comma, 2, ".");
}

}  // namespace

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define BOXED(precision, ...)                 \
  m.impl(operator_name(#__VA_ARGS__).c_str(), \
         torch::CppFunction::makeFromBoxedFunction<&boxed<Precision::precision>>());
#define LOWER(...) BOXED(lower, __VA_ARGS__)
#define FLOAT32(...) BOXED(float32, __VA_ARGS__)
#define FLOAT32_RESULT(...) BOXED(float32_result, __VA_ARGS__)
#define WIDEST(...) BOXED(widest, __VA_ARGS__)
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
  AT_FORALL_FP32(FLOAT32)
  AT_FORALL_FP32_SET_OPT_DTYPE(FLOAT32_RESULT)
  AT_FORALL_PROMOTE(WIDEST)
#undef LOWER
#undef FLOAT32
#undef FLOAT32_RESULT
#undef WIDEST
#undef BOXED
}

}  // namespace at::autocast
