// DeviceLaunches: has the tensors of an op read on their device, in the middle of that op.
//
// Where a backend's kernels are C++ (torch/read/direct.h), nothing of Python runs between the op
// and the launch: python/fastcheck/monitor/op_level/level.py is called for the first tensor of a
// segment of the ring and of a stream, and for whatever fails here.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>
#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "torch/op_level/line_numbers.h"
#include "torch/op_level/op_observer.h"
#include "torch/python/lock.h"
#include "torch/python/rows.h"
#include "torch/read/depths.h"
#include "torch/read/direct.h"
#include "torch/read/slots.h"

namespace fastcheck::op_level {

// The launches of one session. All with the interpreter's lock.
class DeviceLaunches {
 public:
  // `lock`: the session's. `otherwise(launches)`: a Launcher of launch.py.
  DeviceLaunches(pybind11::object lock, pybind11::object otherwise, std::int64_t depth);

  // Raises nothing: it is called in the middle of an op.
  void launch(std::vector<Launch> launches);

  // Sends what is read from now on on the current stream of the slots' device to these rows, by
  // `observe`, a DirectObserve in a capsule. Further streams may fill the same rows.
  void set_rows(pybind11::capsule observe, pybind11::object slots, pybind11::object identities,
                pybind11::object cursor);
  void set_depth(std::int64_t depth) { depths_.set(checked_depth(depth)); }
  void clear_rows() { targets_.clear(); }

  // The lines of the open step; a judge of the step keeps them.
  std::shared_ptr<LineNumbers> lines() const { return lines_; }
  void begin_step() { lines_ = std::make_shared<LineNumbers>(); }

 private:
  struct Target;
  std::shared_ptr<Target> target_of(c10::Device device) const;
  std::size_t read(const std::vector<Launch>& launches, std::size_t first);

  pybind11::object lock_object_;
  SessionLock* lock_;
  pybind11::object otherwise_;
  Depths depths_;
  std::shared_ptr<LineNumbers> lines_ = std::make_shared<LineNumbers>();
  // One for each device. Shared: a launch may let other threads run, which may drop it.
  std::vector<std::shared_ptr<Target>> targets_;
};

// Defines the types DeviceLaunches and LineNumbers.
void bind_device_launches(pybind11::module_& m);

}  // namespace fastcheck::op_level
