// Without the dispatcher, as module.cpp, and with Python's lock held throughout: a launch is over
// before another thread could have taken it.
#include "torch/binding/cuda_module.h"

#include <optional>
#include <stdexcept>
#include <string>

#include "cuda/launch.h"
#include "torch/cuda/black_box.h"
#include "torch/cuda/device.h"
#include "torch/cuda/observe.h"
#include "torch/python/tensors.h"
#include "torch/read/direct.h"
#include "torch/read/slots.h"
#include "torch/read/tensor_view.h"

namespace py = pybind11;

namespace fastcheck::cuda {
namespace {

void observe_one(py::handle tensor, py::handle slots, std::int64_t index, std::int64_t depth) {
  observe(readable(tensor, kDeviceType), unpack(slots), index, checked_depth(depth), false);
}

void observe_directly(at::ArrayRef<at::Tensor> tensors, const at::Tensor& slots, std::int64_t first,
                      Depth depth) {
  for (const at::Tensor& tensor : tensors) {
    const std::string reason = unreadable_reason(tensor, kDeviceType);
    if (!reason.empty()) throw std::invalid_argument(reason);
  }
  observe(tensors, slots, first, depth, false);
}

constexpr DirectObserve kDirectObserve{observe_directly};

void observe_list(const py::sequence& tensors, py::handle slots, std::int64_t first,
                  std::int64_t depth, bool logical, const py::object& gate) {
  const std::optional<at::Tensor> opens =
      gate.is_none() ? std::nullopt : std::make_optional(unpack(gate));
  observe(readable_list(tensors, kDeviceType), unpack(slots), first, checked_depth(depth), logical,
          opens);
}

py::object found_nonfinite_in(const py::sequence& tensors) {
  return wrap(found_nonfinite(readable_list(tensors, kDeviceType)));
}

const at::Tensor& with_exponents(py::handle object) {
  const at::Tensor& tensor = readable(object, kDeviceType);
  if (!at::isFloatingType(tensor.scalar_type()) && !at::isComplexType(tensor.scalar_type())) {
    throw py::type_error(c10::str("expected a floating-point or complex dtype, got ",
                                  tensor.scalar_type(), ", which has no exponents"));
  }
  return tensor;
}

// int64 (kExponentWords,), on the tensor's device.
py::object exponents_of(py::handle tensor, bool logical) {
  return wrap(exponents(with_exponents(tensor), logical));
}

py::object observe_one_and_count(py::handle tensor, py::handle slots, std::int64_t index) {
  return wrap(observe_and_count(with_exponents(tensor), unpack(slots), index));
}

}  // namespace

void define_functions(py::module_& m) {
  m.def("cuda_problem", problem, py::arg("device"));
  m.def("cuda_observe", observe_one, py::arg("tensor"), py::arg("slots"), py::arg("index"),
        py::arg("depth"));
  m.def("cuda_observe_list", observe_list, py::arg("tensors"), py::arg("slots"), py::arg("first"),
        py::arg("depth"), py::arg("logical") = false, py::arg("gate") = py::none());
  m.def("cuda_direct_observe", [] { return py::capsule(&kDirectObserve, kDirectObserveName); });
  m.def("cuda_begin_stretch", begin_stretch, py::arg("device"));
  m.def(
      "cuda_box", [](c10::DeviceIndex device) { return py::bytes(box_contents(device)); },
      py::arg("device"));
  m.def("cuda_exchange_capture_mode", fastcheck_cuda_exchange_capture_mode, py::arg("mode"));
  m.def("cuda_exponents", exponents_of, py::arg("tensor"), py::arg("logical") = false);
  m.def("cuda_observe_and_count", observe_one_and_count, py::arg("tensor"), py::arg("slots"),
        py::arg("index"));
  m.def("cuda_found_nonfinite", found_nonfinite_in, py::arg("tensors"));
}

}  // namespace fastcheck::cuda
