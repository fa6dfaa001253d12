#include "torch/read/tensor_view.h"

#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/DeviceType.h>

namespace fastcheck {
namespace {

// torch looks for its own kinds whenever it is asked. Later only another library's can come.
bool has_accelerator() {
  static const bool has_one_of_torch = at::getAccelerator().has_value();
  return has_one_of_torch || c10::is_privateuse1_backend_registered();
}

std::string supported_dtypes() {
  std::string names;
  for (const DTypeInfo& info : kDTypes)
    names += (names.empty() ? "" : ", ") + std::string(info.name);
  return names;
}

// One past the last storage element that the tensor reaches.
std::int64_t storage_end(const at::Tensor& tensor) {
  std::int64_t end = tensor.storage_offset() + 1;
  for (std::int64_t d = 0; d < tensor.dim(); ++d) end += (tensor.size(d) - 1) * tensor.stride(d);
  return end;
}

bool holds_its_elements(const at::Tensor& tensor) {
  return tensor.numel() == 0 || static_cast<std::int64_t>(tensor.storage().nbytes()) >=
                                    storage_end(tensor) * tensor.element_size();
}

}  // namespace

std::optional<DType> dtype_of(at::ScalarType type) {
  switch (type) {
    case at::kDouble: return DType::k_float64;
    case at::kFloat: return DType::k_float32;
    case at::kHalf: return DType::k_float16;
    case at::kBFloat16: return DType::k_bfloat16;
    case at::kFloat8_e4m3fn: return DType::k_float8_e4m3fn;
    case at::kFloat8_e5m2: return DType::k_float8_e5m2;
    case at::kComplexFloat: return DType::k_complex64;
    case at::kComplexDouble: return DType::k_complex128;
    case at::kChar: return DType::k_int8;
    case at::kShort: return DType::k_int16;
    case at::kInt: return DType::k_int32;
    case at::kLong: return DType::k_int64;
    case at::kByte: return DType::k_uint8;
    case at::kUInt16: return DType::k_uint16;
    case at::kUInt32: return DType::k_uint32;
    case at::kUInt64: return DType::k_uint64;
    case at::kBool: return DType::k_bool;
    default: return std::nullopt;
  }
}

bool may_be_in_flight(const at::Tensor& tensor) {
  if (!tensor.is_cpu() || !tensor.has_storage() || !has_accelerator()) return false;
  const void* const data = tensor.storage().data();
  return data != nullptr && at::globalContext().isPinnedPtr(data);
}

std::string unreadable_reason(const at::Tensor& tensor, c10::DeviceType device) {
  if (!tensor.defined()) {
    return "expected a tensor, got an undefined one (a gradient that was never computed?)";
  }
  if (tensor.layout() != at::kStrided || tensor.is_nested()) {
    return c10::str("expected a strided tensor, got layout ", tensor.layout(),
                    tensor.is_nested() ? " (nested)" : "",
                    "; give its values (sparse: x.coalesce().values(), nested: x.values())");
  }
  if (tensor.is_quantized()) {
    return "expected a plain tensor, got a quantized one; give x.int_repr() or x.dequantize()";
  }
  if (!dtype_of(tensor.scalar_type()).has_value()) {
    return c10::str("expected one of the supported dtypes (", supported_dtypes(), "), got ",
                    tensor.scalar_type(), "; convert it with x.to(...) first");
  }
  if (tensor.is_meta()) {
    return "expected a tensor with memory, got a meta tensor; materialise it first";
  }
  if (tensor.key_set().has(c10::DispatchKey::Python) || !tensor.has_storage()) {
    return "expected a plain tensor, got a tensor subclass that has no memory of its own (a fake "
           "tensor, a DTensor, a vmap or grad wrapper); give the local tensor, or call "
           "torch.ops.fastcheck.* while tracing";
  }
  if (tensor.device().type() != device) {
    return c10::str("expected a ", c10::DeviceTypeName(device), " tensor, got one on ",
                    tensor.device(), "; these kernels read no other: use fastcheck.stats");
  }
  if (!holds_its_elements(tensor)) {
    return c10::str("expected a tensor whose storage holds all its elements, got one that needs ",
                    storage_end(tensor) * tensor.element_size(), " bytes over a storage of ",
                    tensor.storage().nbytes(),
                    "; its memory was freed or resized (a sharded parameter outside its forward?)");
  }
  return {};
}

at::Tensor resolve_views(const at::Tensor& tensor) { return tensor.resolve_conj().resolve_neg(); }

Order order_of(const at::Tensor& tensor) {
  const bool is_dense = tensor.is_conj() || tensor.is_neg() || tensor.is_contiguous() ||
                        tensor.is_non_overlapping_and_dense();
  return is_dense ? Order::kStorage : Order::kLogical;
}

cpu::TensorView view_of(const at::Tensor& tensor) {
  const bool contiguous = tensor.is_contiguous();
  return {static_cast<const std::byte*>(tensor.const_data_ptr()),
          *dtype_of(tensor.scalar_type()),
          tensor.numel(),
          static_cast<int>(tensor.dim()),
          tensor.sizes().data(),
          tensor.strides().data(),
          contiguous || tensor.is_non_overlapping_and_dense(),
          contiguous};
}

}  // namespace fastcheck
