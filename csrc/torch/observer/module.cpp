#include "torch/observer/module.h"

#include <ATen/ATen.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cstring>

#include "torch/observe.h"
#include "torch/observer/op_observer.h"
#include "torch/slots.h"
#include "torch/tensor_view.h"

namespace py = pybind11;

namespace fastcheck::observer {
namespace {

// Called, and let go, on whatever thread a culprit was found, which need not hold the interpreter's
// lock.
std::function<std::string()> as_line(py::function function) {
  const auto release = [](py::function* held) {
    if (!Py_IsInitialized()) return;  // the process ends: the object goes with it
    const py::gil_scoped_acquire acquire;
    delete held;
  };
  std::shared_ptr<py::function> shared(new py::function(std::move(function)), release);
  return [shared = std::move(shared)]() -> std::string {
    if (!Py_IsInitialized()) return {};
    const py::gil_scoped_acquire acquire;
    try {
      return (*shared)().cast<std::string>();
    } catch (const std::exception&) {
      return {};
    }
  };
}

std::uint64_t start(OpObserver& observer, std::int64_t depth, py::function line,
                    std::vector<std::string> ops, std::vector<std::string> not_ops,
                    std::vector<std::uint8_t> modules, bool outside, std::uint32_t roles,
                    bool copies) {
  const Depth checked = checked_depth(depth);
  std::function<std::string()> callback = as_line(std::move(line));
  const py::gil_scoped_release release;
  return observer.start(checked, std::move(callback),
                        {std::move(ops), std::move(not_ops), std::move(modules), outside, roles},
                        copies);
}

void stop(OpObserver& observer, std::uint64_t run) {
  const py::gil_scoped_release release;
  observer.stop(run);
}

py::tuple read(OpObserver& observer, py::handle object, std::int32_t site, std::int32_t call,
               std::uint32_t flags) {
  if (!THPVariable_Check(object.ptr())) throw py::type_error("expected a torch.Tensor");
  const at::Tensor tensor = THPVariable_Unpack(object.ptr());
  const std::string reason = unreadable_reason(tensor, tensor.device().type());
  if (!reason.empty()) throw py::type_error(reason);
  OpObserver::Reading reading;
  {
    const py::gil_scoped_release release;
    reading = observer.read(tensor, site, call, flags);
  }
  return py::make_tuple(reading.seq, reading.is_bad, reading.is_collective);
}

py::dict as_dict(const Incident& incident) {
  py::dict d;
  d["op"] = incident.op;
  d["direction"] = static_cast<int>(incident.direction);
  d["is_recompute"] = incident.is_recompute;
  d["infinite_scalars"] = static_cast<int>(incident.infinite_scalars);
  d["node"] = incident.node;
  d["line"] = incident.line;
  d["forward_line"] = incident.forward_line;
  py::list fed;
  for (const Fed& one : incident.fed) {
    fed.append(py::make_tuple(one.seq, one.is_arrival, one.is_collective));
  }
  d["fed"] = fed;
  py::list inputs;
  for (const Input& one : incident.inputs) inputs.append(py::make_tuple(one.argument, one.seq));
  d["inputs"] = inputs;
  py::list made;
  for (std::size_t i = 0; i < incident.made.size(); ++i) {
    made.append(py::make_tuple(incident.made[i], incident.is_bad[i] != 0));
  }
  d["made"] = made;
  return d;
}

// (records uint8 (n, 192), incidents, new sites, number of the first new site)
py::tuple take(OpObserver& observer) {
  Batch batch;
  {
    const py::gil_scoped_release release;
    batch = observer.take();
  }
  const auto count = static_cast<std::int64_t>(batch.records.size());
  at::Tensor records =
      at::detail::empty_cpu({count, static_cast<std::int64_t>(sizeof(Record))}, at::kByte);
  if (count > 0) {
    std::memcpy(records.mutable_data_ptr(), batch.records.data(),
                batch.records.size() * sizeof(Record));
  }
  py::list incidents, sites;
  for (const Incident& incident : batch.incidents) incidents.append(as_dict(incident));
  for (const OpSite& site : batch.sites) {
    sites.append(py::make_tuple(site.module, site.op, site.forward_op,
                                static_cast<int>(site.direction), static_cast<int>(site.role),
                                site.index));
  }
  return py::make_tuple(py::reinterpret_steal<py::object>(THPVariable_Wrap(std::move(records))),
                        incidents, sites, batch.first_site);
}

}  // namespace

void bind(py::module_& m) {
  const auto without_lock = py::call_guard<py::gil_scoped_release>();
  py::class_<OpObserver, std::unique_ptr<OpObserver, py::nodelete>>(m, "OpObserver")
      .def("start", start, py::arg("depth"), py::arg("line"),
           py::arg("ops") = std::vector<std::string>(),
           py::arg("not_ops") = std::vector<std::string>(),
           py::arg("modules") = std::vector<std::uint8_t>(), py::arg("outside") = true,
           py::arg("roles") = Filter().roles, py::arg("copies") = false)
      .def("stop", stop, py::arg("run"))
      .def("run", &OpObserver::run)
      .def("begin_step", &OpObserver::begin_step, py::arg("step"), without_lock)
      .def("set_backward_flags", &OpObserver::set_backward_flags, py::arg("flags"))
      .def("set_active", &OpObserver::set_active, py::arg("active"), without_lock)
      .def(
          "set_mode",
          [](OpObserver& observer, py::handle mode) {
            observer.set_mode(mode.is_none() ? nullptr : mode.ptr());
          },
          py::arg("mode"))
      .def(
          "enter", [](OpObserver&, std::int32_t module) { OpObserver::enter(module); },
          py::arg("module"))
      .def("leave", [](OpObserver&) { OpObserver::leave(); })
      .def(
          "set_optimizer", [](OpObserver&, bool at_work) { OpObserver::set_optimizer(at_work); },
          py::arg("at_work"))
      .def(
          "pause", [](OpObserver&, int delta) { OpObserver::pause(delta); }, py::arg("delta"))
      .def("read", read, py::arg("tensor"), py::arg("site"), py::arg("call") = 0,
           py::arg("flags") = 0)
      .def("has_incidents", &OpObserver::has_incidents)
      .def("next_seq", &OpObserver::next_seq)
      .def("op_name", &OpObserver::op_name, py::arg("number"))
      .def("argument_name", &OpObserver::argument_name, py::arg("number"), py::arg("position"))
      .def("take", take);
  m.def("op_observer", &OpObserver::instance, py::return_value_policy::reference);
}

}  // namespace fastcheck::observer
