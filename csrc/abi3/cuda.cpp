#include "abi3/cuda.h"

#include "abi3/arguments.h"
#include "cuda/exponents.h"
#include "cuda/launch.h"
#include "kernels/cuda_arguments.h"
#include "kernels/cuda_errors.h"

namespace fastcheck::abi3 {
namespace {

using cuda::check;
using cuda::TensorArgument;

std::vector<TensorArgument> arguments_of(const Tensors& tensors, bool logical, std::int64_t slot) {
  std::vector<TensorArgument> arguments;
  for (const cpu::TensorView& view : tensors.views()) {
    arguments.push_back(cuda::argument_of(view, slot++, logical));
  }
  return arguments;
}

cuda::Tuning tuning_of(PyObject* multiprocessors) {
  cuda::Tuning tuning{};
  tuning.multiprocessors = static_cast<std::int32_t>(integer(multiprocessors));
  return tuning;
}

cuda::Workspace workspace_of(PyObject* tuple) {
  const std::vector<PyObject*> fields =
      items(tuple,
            "a workspace (counters, partials, their bytes, table, its copy, their bytes, gate)", 7);
  return {pointer<cuda::Counter>(fields[0]),
          pointer(fields[1]),
          integer(fields[2]),
          pointer(fields[3]),
          pointer(fields[4]),
          integer(fields[5]),
          {},
          pointer<std::int32_t>(fields[6])};
}

PyObject* device(const std::vector<PyObject*>&) {
  std::int32_t multiprocessors = 0;
  int error = cuda::fastcheck_cuda_device(&multiprocessors);
  if (error == 0) error = cuda::fastcheck_cuda_find_exponents();
  if (error != 0) throw std::runtime_error(cuda::fastcheck_cuda_error_name(error));
  return PyLong_FromLong(multiprocessors);
}

PyObject* is_capturing(const std::vector<PyObject*>& given) {
  int capturing = 0;
  check(cuda::fastcheck_cuda_is_capturing(pointer(given[0]), &capturing),
        "asking for a graph's capture");
  return PyBool_FromLong(capturing);
}

PyObject* exchange_capture_mode(const std::vector<PyObject*>& given) {
  const auto mode = static_cast<int>(integer(given[0]));
  return PyLong_FromLong(cuda::fastcheck_cuda_exchange_capture_mode(mode));
}

PyObject* workspace(const std::vector<PyObject*>& given) {
  const Tensors tensors(given[0]);
  const std::vector<TensorArgument> arguments = arguments_of(tensors, integer(given[1]) != 0, 0);
  const cuda::Tuning tuning = tuning_of(given[2]);
  cuda::WorkspaceSize size;
  check(cuda::fastcheck_cuda_workspace(arguments.data(), static_cast<int>(arguments.size()),
                                       &tuning, &size),
        "planning a launch");
  return Py_BuildValue("(LLL)", static_cast<long long>(size.counters),
                       static_cast<long long>(size.partials_bytes),
                       static_cast<long long>(size.table_bytes));
}

PyObject* records(const std::vector<PyObject*>& given) {
  const Tensors tensors(given[0]);
  const std::vector<TensorArgument> arguments = arguments_of(tensors, integer(given[1]) != 0, 0);
  const Depth depth = depth_of(integer(given[2]));
  auto* const slots = pointer<Record>(given[3]);
  const cuda::Tuning tuning = tuning_of(given[4]);
  const cuda::Workspace buffers = workspace_of(given[5]);
  void* const stream = pointer(given[6]);
  int error;
  {
    const WithoutLock without_lock;
    error = cuda::fastcheck_cuda_records(arguments.data(), static_cast<int>(arguments.size()),
                                         static_cast<int>(depth), slots, &buffers, &tuning, stream);
  }
  check(error, "a launch");
  Py_RETURN_NONE;
}

PyObject* found_nonfinite(const std::vector<PyObject*>& given) {
  const Tensors tensors(given[0]);
  const std::vector<TensorArgument> arguments = arguments_of(tensors, false, 0);
  auto* const found = pointer<float>(given[1]);
  const cuda::Tuning tuning = tuning_of(given[2]);
  const cuda::Workspace buffers = workspace_of(given[3]);
  void* const stream = pointer(given[4]);
  int error;
  {
    const WithoutLock without_lock;
    error = cuda::fastcheck_cuda_found_nonfinite(
        arguments.data(), static_cast<int>(arguments.size()), found, &buffers, &tuning, stream);
  }
  check(error, "a launch");
  Py_RETURN_NONE;
}

// Of one tensor, and of its record too where there is a slot for it.
PyObject* exponents_workspace(const std::vector<PyObject*>& given) {
  const Tensors tensors(given[0]);
  const TensorArgument argument = arguments_of(tensors, integer(given[1]) != 0, 0).at(0);
  const bool has_record = integer(given[2]) != 0;
  const cuda::Tuning tuning = tuning_of(given[3]);
  cuda::WorkspaceSize size;
  check(has_record ? cuda::fastcheck_cuda_record_and_exponents_workspace(&argument, &tuning, &size)
                   : cuda::fastcheck_cuda_exponents_workspace(&argument, &size),
        "planning a launch");
  return Py_BuildValue("(LLL)", static_cast<long long>(size.counters),
                       static_cast<long long>(size.partials_bytes),
                       static_cast<long long>(size.table_bytes));
}

PyObject* exponents(const std::vector<PyObject*>& given) {
  const Tensors tensors(given[0]);
  const TensorArgument argument = arguments_of(tensors, integer(given[1]) != 0, 0).at(0);
  auto* const slot = pointer<Record>(given[2]);
  auto* const words = pointer<std::int64_t>(given[3]);
  const cuda::Tuning tuning = tuning_of(given[4]);
  const cuda::Workspace buffers = workspace_of(given[5]);
  void* const stream = pointer(given[6]);
  int error;
  {
    const WithoutLock without_lock;
    error = slot != nullptr
                ? cuda::fastcheck_cuda_record_and_exponents(&argument, slot, words, &buffers,
                                                            &tuning, stream)
                : cuda::fastcheck_cuda_exponents(&argument, words, &buffers, &tuning, stream);
  }
  check(error, "a launch");
  Py_RETURN_NONE;
}

}  // namespace

const PyMethodDef kCudaMethods[] = {
    {"cuda_device", method<0, device>, METH_VARARGS, nullptr},
    {"cuda_is_capturing", method<1, is_capturing>, METH_VARARGS, nullptr},
    {"cuda_exchange_capture_mode", method<1, exchange_capture_mode>, METH_VARARGS, nullptr},
    {"cuda_workspace", method<3, workspace>, METH_VARARGS, nullptr},
    {"cuda_records", method<7, records>, METH_VARARGS, nullptr},
    {"cuda_found_nonfinite", method<5, found_nonfinite>, METH_VARARGS, nullptr},
    {"cuda_exponents_workspace", method<4, exponents_workspace>, METH_VARARGS, nullptr},
    {"cuda_exponents", method<7, exponents>, METH_VARARGS, nullptr},
};
const int kCudaMethodCount = sizeof(kCudaMethods) / sizeof(kCudaMethods[0]);

}  // namespace fastcheck::abi3
