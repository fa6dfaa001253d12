// fastcheck._C: what a schema cannot carry, or carries too slowly.
//
// The functions are those of ops.cpp without the dispatcher, which alone takes longer than reading
// a small tensor; SeenTensors is a host object. The Python side goes through torch.ops while
// tracing.
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/scalar_tensor.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/version.h>

#include <algorithm>

#include "core/record.h"
#include "torch/binding/cuda_module.h"
#include "torch/dump/module.h"
#include "torch/hooks/call.h"
#include "torch/hooks/held_locals.h"
#include "torch/hooks/last_nodes.h"
#include "torch/hooks/module_recorder.h"
#include "torch/hooks/reader.h"
#include "torch/hooks/recorder.h"
#include "torch/hooks/stored.h"
#include "torch/kernels/imported.h"
#include "torch/op_level/module.h"
#include "torch/op_level/scopes.h"
#include "torch/python/cursor.h"
#include "torch/python/lock.h"
#include "torch/python/observe.h"
#include "torch/python/rows.h"
#include "torch/python/tensors.h"
#include "torch/read/observe.h"
#include "torch/read/seen_tensors.h"
#include "torch/read/slots.h"
#include "torch/read/tensor_view.h"

namespace py = pybind11;

namespace fastcheck {
namespace {

// A record of its own, not a slot: a plain allocation without the dispatcher's.
at::Tensor new_records(std::int64_t count) {
  return at::detail::empty_cpu({count, static_cast<std::int64_t>(sizeof(Record))}, at::kByte);
}

py::object record(py::handle object, std::int64_t depth, bool logical) {
  const at::Tensor& tensor = readable(object);
  at::Tensor out = at::detail::empty_cpu({static_cast<std::int64_t>(sizeof(Record))}, at::kByte);
  observe_from_python(tensor, checked_depth(depth), logical, {}, *slot(out, 0));
  return wrap(std::move(out));
}

py::object record_list(const py::sequence& objects, std::int64_t depth, bool logical) {
  const std::vector<at::Tensor> tensors = readable_list(objects);
  const Depth checked = checked_depth(depth);
  at::Tensor out = new_records(static_cast<std::int64_t>(tensors.size()));
  Record* records = slot(out, 0, static_cast<std::int64_t>(tensors.size()));
  {
    const py::gil_scoped_release release;
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      observe(tensors[i], checked, logical, {}, records[i]);
    }
  }
  return wrap(std::move(out));
}

py::object found_nonfinite(const py::sequence& objects) {
  const std::vector<at::Tensor> tensors = readable_list(objects);
  bool found = false;
  {
    const py::gil_scoped_release release;
    for (std::size_t i = 0; i < tensors.size() && !found; ++i) {
      Record record;
      observe(tensors[i], Depth::kHealth, false, {}, record);
      found = (record.flags & kFlagNonfinite) != 0;
    }
  }
  return wrap(at::scalar_tensor(found ? 1.0 : 0.0, at::kFloat));
}

bool observe_one(py::handle object, py::handle slots, std::int64_t index, std::int64_t depth,
                 std::int32_t site, std::int32_t call, std::int64_t step, std::int64_t seq,
                 std::uint32_t flags) {
  const at::Tensor& tensor = readable(object);
  Record* record = slot(unpack(slots), index);
  observe_from_python(tensor, checked_depth(depth), false, {seq, step, call, site, flags}, *record);
  return (record->flags & kFlagNonfinite) != 0;
}

// The first elements of small tensors, each of which lies anywhere, on their way into the cache.
constexpr std::size_t kAhead = 4;
void ask_for_elements(const at::Tensor& tensor) {
  constexpr std::size_t kLine = 64, kMost = 8 * kLine;
  const auto* const first = static_cast<const char*>(tensor.const_data_ptr());
  for (std::size_t i = 0; i < std::min(tensor.nbytes(), kMost); i += kLine) {
    __builtin_prefetch(first + i);
  }
}

std::int64_t observe_list(const py::sequence& objects, py::handle slots, std::int64_t first,
                          std::int64_t depth, const std::vector<std::int32_t>& sites,
                          std::int64_t step, std::int64_t first_seq, std::uint32_t flags) {
  const std::vector<at::Tensor> tensors = readable_list(objects);
  if (sites.size() != tensors.size()) {
    throw py::value_error("expected one site per tensor (" + std::to_string(tensors.size()) +
                          "), got " + std::to_string(sites.size()));
  }
  const Depth checked = checked_depth(depth);
  Record* records = slot(unpack(slots), first, static_cast<std::int64_t>(tensors.size()));
  std::int64_t nonfinite = 0;
  const py::gil_scoped_release release;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (i + kAhead < tensors.size()) ask_for_elements(tensors[i + kAhead]);
    const auto n = static_cast<std::int64_t>(i);
    observe(tensors[i], checked, false, {first_seq + n, step, 0, sites[i], flags}, records[i]);
    nonfinite += (records[i].flags & kFlagNonfinite) != 0;
  }
  return nonfinite;
}

bool is_in_flight(py::handle object) { return may_be_in_flight(unpack(object)); }

std::int64_t add_seen(SeenTensors& seen, py::handle object, std::int64_t seq) {
  return seen.add(unpack(object), seq);
}

}  // namespace
}  // namespace fastcheck

PYBIND11_MODULE(_C, m) {
  using namespace fastcheck;
  import_kernels();
  m.doc() = "fastcheck's compiled part; use fastcheck, not this.";
  m.def("record", record, py::arg("tensor"), py::arg("depth") = 3, py::arg("logical") = false);
  m.def("record_list", record_list, py::arg("tensors"), py::arg("depth") = 3,
        py::arg("logical") = false);
  m.def("found_nonfinite", found_nonfinite, py::arg("tensors"));
  m.def("may_be_in_flight", is_in_flight, py::arg("tensor"));
  m.def("observe", observe_one, py::arg("tensor"), py::arg("slots"), py::arg("index"),
        py::arg("depth"), py::arg("site"), py::arg("call"), py::arg("step"), py::arg("seq"),
        py::arg("flags") = 0);
  m.def("observe_list", observe_list, py::arg("tensors"), py::arg("slots"), py::arg("first"),
        py::arg("depth"), py::arg("sites"), py::arg("step"), py::arg("first_seq"),
        py::arg("flags") = 0);
  py::class_<SeenTensors>(m, "SeenTensors")
      .def(py::init<>())
      .def("add", add_seen, py::arg("tensor"), py::arg("seq"))
      .def("clear", &SeenTensors::clear)
      .def("__len__", &SeenTensors::size);
  define_hook_reader(m);
  define_session_lock(m);
  define_scopes(m);
  define_cursor(m);
  define_rows(m);
  define_hook_call(m);
  define_hook_recorder(m);
  define_module_recorder(m);
  define_stored(m);
  define_held_locals(m);
  define_last_nodes(m);
  dump::define_op_recorder(m);
  cuda::define_functions(m);
  op_level::bind(m);
  m.def("torch_version", [] { return std::string(TORCH_VERSION); });
}
