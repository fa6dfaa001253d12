#include "torch/op_level/module.h"

#include <ATen/core/Tensor.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>

#include "torch/op_level/device_launches.h"
#include "torch/op_level/op_observer.h"
#include "torch/python/tensors.h"
#include "torch/read/observe.h"
#include "torch/read/slots.h"
#include "torch/read/tensor_view.h"

namespace py = pybind11;

namespace fastcheck::op_level {
namespace {

// Let go on whatever thread is the last to hold it, which need not hold the interpreter's lock.
std::shared_ptr<py::object> shared_between_threads(const py::object& object) {
  const auto release = [](py::object* held) {
    if (!Py_IsInitialized()) return;  // the process ends: the object goes with it
    const py::gil_scoped_acquire acquire;
    delete held;
  };
  return {new py::object(object), release};
}

std::function<std::string()> as_line(const py::object& function) {
  return [shared = shared_between_threads(function)]() -> std::string {
    if (!Py_IsInitialized()) return {};
    const py::gil_scoped_acquire acquire;
    // An op that raises is over, too, as one that saves the last tensor that a checkpoint needs.
    const py::error_scope raised;
    try {
      return (*shared)().cast<std::string>();
    } catch (const std::exception&) {
      return {};
    }
  };
}

using Launcher = std::function<void(std::vector<Launch>)>;

Launcher as_launcher(const py::object& launches) {
  if (launches.is_none()) return {};
  auto* const own = launches.cast<DeviceLaunches*>();
  return [shared = shared_between_threads(launches), own](std::vector<Launch> list) {
    if (!Py_IsInitialized()) return;
    const py::gil_scoped_acquire acquire;
    const py::error_scope raised;
    own->launch(std::move(list));
  };
}

std::uint64_t start(OpObserver& observer, std::int64_t depth, py::function line,
                    std::vector<std::string> ops, std::vector<std::string> not_ops,
                    std::vector<std::uint8_t> modules, bool outside, std::uint32_t roles,
                    bool copies, const py::object& launches) {
  Options options;
  options.depth = checked_depth(depth);
  options.filter = {std::move(ops), std::move(not_ops), std::move(modules), outside, roles};
  options.copies = copies;
  options.line = as_line(line);
  options.launch = as_launcher(launches);
  const py::gil_scoped_release release;
  return observer.start(std::move(options));
}

void stop(OpObserver& observer, std::uint64_t run) {
  const py::gil_scoped_release release;
  observer.stop(run);
}

using Read = OpObserver::Reading (OpObserver::*)(const at::Tensor&, std::int32_t, std::int32_t,
                                                 std::uint32_t);

std::pair<OpObserver::Reading, py::object> read_by(Read method, OpObserver& observer,
                                                   py::handle object, std::int32_t site,
                                                   std::int32_t call, std::uint32_t flags) {
  if (!THPVariable_Check(object.ptr())) throw py::type_error("expected a torch.Tensor");
  const at::Tensor tensor = THPVariable_Unpack(object.ptr());
  const std::string reason = unreadable_reason(tensor, tensor.device().type());
  if (!reason.empty()) throw py::type_error(reason);
  OpObserver::Reading reading;
  {
    const py::gil_scoped_release release;
    reading = (observer.*method)(tensor, site, call, flags);
  }
  return {reading, reading.is_pending ? py::object(py::none()) : py::bool_(reading.is_bad)};
}

py::tuple read(OpObserver& observer, py::handle object, std::int32_t site, std::int32_t call,
               std::uint32_t flags) {
  const auto [reading, is_bad] = read_by(&OpObserver::read, observer, object, site, call, flags);
  return py::make_tuple(reading.seq, is_bad, reading.is_collective);
}

void reach(OpObserver& observer, const py::list& objects, const std::vector<std::int32_t>& places) {
  std::vector<at::Tensor> tensors;
  for (const py::handle object : objects) tensors.push_back(unpack(object));
  if (tensors.size() != places.size()) throw py::value_error("expected a place for each tensor");
  const py::gil_scoped_release release;
  observer.reach(tensors, places);
}

py::tuple read_again(OpObserver& observer, py::handle object, std::int32_t site, std::int32_t call,
                     std::uint32_t flags) {
  const auto [reading, is_bad] =
      read_by(&OpObserver::read_again, observer, object, site, call, flags);
  return py::make_tuple(reading.seq, is_bad, reading.source);
}

py::tuple take_over(OpObserver& observer, py::handle object, std::int32_t site) {
  const auto [reading, is_bad] = read_by(&OpObserver::take_over, observer, object, site, 0, 0);
  return py::make_tuple(reading.seq, is_bad, reading.is_collective, reading.suspects);
}

py::dict as_dict(const Incident& incident) {
  py::dict d;
  d["op"] = incident.op;
  d["direction"] = static_cast<int>(incident.direction);
  d["is_recompute"] = incident.is_recompute;
  d["is_unseen"] = incident.is_unseen;
  d["reads_in_flight"] = incident.reads_in_flight;
  d["place"] = incident.place;
  d["infinite_scalars"] = static_cast<int>(incident.infinite_scalars);
  d["api"] = incident.api;
  d["node"] = incident.node;
  d["line"] = incident.line;
  d["forward_seq"] = incident.forward_seq;
  d["forward_line"] = spelt(incident.forward_line);
  py::list fed;
  for (const Fed& one : incident.fed) {
    fed.append(py::make_tuple(one.seq, one.is_arrival, one.is_collective, one.also, one.read));
  }
  d["fed"] = fed;
  py::list inputs;
  for (const Input& one : incident.inputs) {
    inputs.append(py::make_tuple(one.argument, one.seq, one.is_part));
  }
  d["inputs"] = inputs;
  py::list made;
  for (std::size_t i = 0; i < incident.made.size(); ++i) {
    made.append(py::make_tuple(incident.made[i], incident.is_bad[i] != 0));
  }
  d["made"] = made;
  return d;
}

py::list as_dicts(const std::vector<Incident>& incidents) {
  py::list dicts;
  for (const Incident& incident : incidents) dicts.append(as_dict(incident));
  return dicts;
}

// Ops whose records are on a device.
struct WaitingOps {
  std::vector<Incident> ops;
};

// (records' bytes, incidents, new sites, number of the first new site, WaitingOps or None, numbers
// of what was left unread)
py::tuple take(OpObserver& observer) {
  Batch batch;
  {
    const py::gil_scoped_release release;
    batch = observer.take();
  }
  // Not a tensor: making an array of one calls ops.
  const auto* const bytes = reinterpret_cast<const char*>(batch.records.data());
  const py::bytearray records(bytes, batch.records.size() * sizeof(Record));
  py::list sites;
  for (const OpSite& site : batch.sites) {
    sites.append(py::make_tuple(site.module, site.op, site.forward_op,
                                static_cast<int>(site.direction), static_cast<int>(site.role),
                                site.index));
  }
  return py::make_tuple(records, as_dicts(batch.incidents), sites, batch.first_site,
                        batch.waiting.empty() ? py::object(py::none())
                                              : py::cast(WaitingOps{std::move(batch.waiting)}),
                        batch.unread);
}

// Takes the ops out of `waiting`.
py::list settle(OpObserver& observer, WaitingOps* waiting, const std::vector<std::int64_t>& bad,
                std::int64_t stop) {
  std::vector<Incident> found;
  std::vector<Incident> ops;
  if (waiting != nullptr) ops.swap(waiting->ops);
  {
    const py::gil_scoped_release release;
    found = observer.settle(std::move(ops), bad, stop);
  }
  return as_dicts(found);
}

// (op, reason, calls, whether the reason is that there were no values)
py::list unread(OpObserver& observer) {
  py::list rows;
  for (const Unread::Row& row : observer.unread()) {
    rows.append(py::make_tuple(observer.op_name(row.op), reason_of(row.readability), row.calls,
                               row.readability == Readability::kMeta));
  }
  return rows;
}

}  // namespace

void bind(py::module_& m) {
  bind_device_launches(m);
  const auto without_lock = py::call_guard<py::gil_scoped_release>();
  py::class_<WaitingOps>(m, "WaitingOps");
  py::class_<OpObserver, std::unique_ptr<OpObserver, py::nodelete>>(m, "OpObserver")
      .def("start", start, py::arg("depth"), py::arg("line"),
           py::arg("ops") = std::vector<std::string>(),
           py::arg("not_ops") = std::vector<std::string>(),
           py::arg("modules") = std::vector<std::uint8_t>(), py::arg("outside") = true,
           py::arg("roles") = Filter().roles, py::arg("copies") = false,
           py::arg("launches") = py::none())
      .def("stop", stop, py::arg("run"))
      .def("run", &OpObserver::run)
      .def("begin_step", &OpObserver::begin_step, py::arg("step"), without_lock)
      .def(
          "set_depth",
          [](OpObserver& observer, std::int64_t depth) {
            observer.set_depth(checked_depth(depth));
          },
          py::arg("depth"), without_lock)
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
          "set_api", [](OpObserver&, std::int64_t api) { OpObserver::set_api(api); },
          py::arg("api"))
      .def("read", read, py::arg("tensor"), py::arg("site"), py::arg("call") = 0,
           py::arg("flags") = 0)
      .def("reach", reach, py::arg("tensors"), py::arg("places"))
      .def("read_again", read_again, py::arg("tensor"), py::arg("site"), py::arg("call"),
           py::arg("flags"))
      .def("take_over", take_over, py::arg("tensor"), py::arg("site"))
      .def("has_incidents", &OpObserver::has_incidents)
      .def("next_seq", &OpObserver::next_seq)
      .def("op_name", &OpObserver::op_name, py::arg("number"))
      .def("argument_name", &OpObserver::argument_name, py::arg("number"), py::arg("position"))
      .def("take", take)
      .def("settle", settle, py::arg("waiting"), py::arg("bad"), py::arg("stop"))
      .def("unread", unread)
      .def(
          "let_wait",
          [](OpObserver& observer, const std::string& device) {
            observer.let_wait(c10::Device(device).type());
          },
          py::arg("device_type"), without_lock)
      .def("read_waiting", &OpObserver::read_waiting, without_lock)
      .def("compared", &OpObserver::compared, py::arg("site"), py::arg("are_same"), without_lock)
      .def(
          "set_device_mode",
          [](OpObserver& observer, const std::string& device, int mode) {
            observer.set_device_mode(c10::Device(device), static_cast<DeviceMode>(mode));
          },
          py::arg("device"), py::arg("mode"), without_lock)
      .def(
          "watch_status",
          [](OpObserver& observer, const std::string& device) {
            observer.watch_status(c10::Device(device));
          },
          py::arg("device"), without_lock)
      .def(
          "leave_out",
          [](OpObserver& observer, py::handle tensor) {
            observer.leave_out(unpack(tensor).device().type());
          },
          py::arg("tensor"));
  m.def("op_observer", &OpObserver::instance, py::return_value_policy::reference);
}

}  // namespace fastcheck::op_level
