#include "torch/op_level/device_launches.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>

#include "torch/python/tensors.h"
#include "torch/python/types.h"
#include "torch/read/slots.h"
#include "torch/read/tensor_view.h"

namespace py = pybind11;

namespace fastcheck::op_level {
namespace {

c10::Stream current_stream_of(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

// (tensor, seq, step, call, site, flags, whether the status word of its device is meant), alone in
// a list.
py::list as_list(const Launch& launch) {
  const Identity& identity = launch.identity;
  py::list row;
  row.append(py::make_tuple(wrap(launch.tensor), identity.seq, identity.step, identity.call,
                            identity.site, identity.flags, launch.is_status));
  return row;
}

}  // namespace

// The destination of the records of a device.
struct DeviceLaunches::Target {
  py::capsule observe_object;
  const DirectObserve* direct;
  at::Tensor slots;
  RingRows rows;
  // The ring has put their first use of these slots behind the slots' allocation, and copies them
  // behind their last.
  std::vector<c10::Stream> streams;

  bool knows(const c10::Stream& stream) const {
    return std::find(streams.begin(), streams.end(), stream) != streams.end();
  }
};

DeviceLaunches::DeviceLaunches(py::object lock, py::object otherwise, std::int64_t depth)
    : lock_object_(std::move(lock)),
      lock_(&session_lock_of(lock_object_)),
      otherwise_(std::move(otherwise)),
      depths_(checked_depth(depth)) {}

void DeviceLaunches::set_rows(py::capsule observe, py::object slots, py::object identities,
                              py::object cursor) {
  const at::Tensor& tensor = unpack(slots);
  const c10::Stream stream = current_stream_of(tensor.device());
  if (const std::shared_ptr<Target> known = target_of(tensor.device())) {
    if (known->rows.has_cursor(cursor)) {
      if (!known->knows(stream)) known->streams.push_back(stream);
      return;
    }
    targets_.erase(std::find(targets_.begin(), targets_.end(), known));
  }
  auto target = std::make_shared<Target>();
  target->direct =
      static_cast<const DirectObserve*>(PyCapsule_GetPointer(observe.ptr(), kDirectObserveName));
  if (target->direct == nullptr) throw py::error_already_set();
  target->observe_object = std::move(observe);
  target->slots = tensor;
  target->rows.set(std::move(slots), std::move(identities), std::move(cursor));
  target->streams = {stream};
  targets_.push_back(std::move(target));
}

std::shared_ptr<DeviceLaunches::Target> DeviceLaunches::target_of(c10::Device device) const {
  for (const std::shared_ptr<Target>& one : targets_) {
    if (one->slots.device() == device) return one;
  }
  return nullptr;
}

// Reads those from `first` on that one launch can take. How many: 0 where Python has to read it.
std::size_t DeviceLaunches::read(const std::vector<Launch>& launches, std::size_t first) {
  const c10::Device device = launches[first].tensor.device();
  const std::shared_ptr<Target> target = target_of(device);
  if (target == nullptr || !target->knows(current_stream_of(device))) return 0;
  const Depth depth = depths_.of(launches[first].tensor);
  std::vector<at::Tensor> tensors;
  for (std::size_t i = first; i < launches.size(); ++i) {
    const Launch& launch = launches[i];
    if (launch.is_status || launch.tensor.device() != device ||
        !dtype_of(launch.tensor.scalar_type()).has_value() || depths_.of(launch.tensor) != depth ||
        static_cast<long long>(tensors.size()) == target->rows.room()) {
      break;
    }
    tensors.push_back(launch.tensor);
  }
  if (tensors.empty()) return 0;
  try {
    target->direct->observe(tensors, target->slots, target->rows.next(), depth);
  } catch (const std::exception&) {
    return 0;  // Python tries the first one again, and reports what it meets
  }
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    target->rows.put(launches[first + i].identity,
                     static_cast<std::int64_t>(*dtype_of(tensors[i].scalar_type())),
                     static_cast<std::int64_t>(order_of(tensors[i])), depth);
  }
  return tensors.size();
}

void DeviceLaunches::launch(std::vector<Launch> launches) {
  try {
    if (!lock_->acquire()) throw py::error_already_set();
    try {
      lines_->add(launches);
      for (std::size_t done = 0; done < launches.size();) {
        const std::size_t count = read(launches, done);
        // In order: Python reads one, and has the rows of the others ready.
        if (count == 0) otherwise_(as_list(launches[done]));
        done += std::max<std::size_t>(count, 1);
      }
    } catch (...) {
      lock_->release();
      throw;
    }
    lock_->release();
  } catch (py::error_already_set& error) {
    error.discard_as_unraisable("fastcheck");
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    PyErr_WriteUnraisable(otherwise_.ptr());
  }
}

void bind_device_launches(py::module_& m) {
  py::class_<LineNumbers, std::shared_ptr<LineNumbers>>(m, "LineNumbers")
      .def("of", &LineNumbers::of, py::arg("seq"));
  py::class_<DeviceLaunches>(m, "DeviceLaunches")
      .def(py::init<py::object, py::object, std::int64_t>(), py::arg("lock"), py::arg("otherwise"),
           py::arg("depth"))
      .def("set_rows", &DeviceLaunches::set_rows, py::arg("observe"), py::arg("slots"),
           py::arg("identities"), py::arg("cursor"))
      .def("set_depth", &DeviceLaunches::set_depth, py::arg("depth"))
      .def("clear_rows", &DeviceLaunches::clear_rows)
      .def("begin_step", &DeviceLaunches::begin_step)
      .def("lines", &DeviceLaunches::lines);
}

}  // namespace fastcheck::op_level
