// HookReader: one call for a hook's tensor. Checks that it can be read and was not read before and,
// on the CPU, writes its record.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>
#include <pybind11/pybind11.h>

#include <array>
#include <cstdint>
#include <optional>

#include "core/dtypes.h"
#include "core/record.h"
#include "torch/read/depths.h"
#include "torch/read/observe.h"
#include "torch/read/seen_tensors.h"

namespace fastcheck {

// The result of read(), from the lowest bit on (python/fastcheck/ring/host.py has the same); below
// 0 are a tensor that passes unread, and one on a device of a type that was not added.
namespace code {
constexpr std::int64_t kUnread = -1, kUnknownDevice = -2;
constexpr std::int64_t kNew = 1;            // read for the first time: remembered under the number
constexpr std::int64_t kBad = 2;            // its record is of non-finite components
constexpr std::int64_t kElsewhere = 4;      // not on the CPU: its record is to be had from there
constexpr std::int64_t kNeedsGradient = 8;  // its gradient will come back
constexpr std::int64_t kNewStream = 16;     // another than that of the last tensor kElsewhere
constexpr int kDTypeShift = 5;              // 5 bits: the dtype code of a record kElsewhere,
constexpr int kOrderShift = 10;             // 1 bit: and its order
constexpr int kSeqShift = 11;               // the number under which the tensor is remembered

constexpr std::int64_t dtype_of(std::int64_t found) { return (found >> kDTypeShift) & 31; }
constexpr std::int64_t order_of(std::int64_t found) { return (found >> kOrderShift) & 1; }
}  // namespace code

// The interpreter's lock guards it, and the session's: reading a large tensor lets the former go.
class HookReader {
 public:
  HookReader(pybind11::object seen, const at::Tensor& slots, Depth depth);

  // Tensors on devices of this one's type are readable too; the CPU's always are.
  void add_device(const at::Tensor& tensor) { known_[type_index(tensor)] = true; }

  // `index`: the slot that a record goes to. `any_dtype`: integers are read too. Throws what
  // fastcheck._C.observe throws; the tensor is remembered by then.
  std::int64_t read(pybind11::handle object, std::int64_t index, const Identity& identity,
                    bool any_dtype);

  Depths& depths() { return depths_; }
  std::int64_t capacity() const { return capacity_; }
  // The stream of the last tensor kElsewhere.
  const c10::Stream& stream() const { return *last_stream_; }

 private:
  static std::size_t type_index(const at::Tensor& tensor) {
    return static_cast<std::size_t>(tensor.device().type());
  }
  std::int64_t elsewhere(const at::Tensor& tensor, DType dtype);

  pybind11::object seen_object_;
  SeenTensors& seen_;
  at::Tensor slots_;
  Depths depths_;
  std::int64_t capacity_;
  std::array<bool, c10::COMPILE_TIME_MAX_DEVICE_TYPES> known_{};
  std::optional<c10::Stream> last_stream_;
};

// The reader in an object of Python's type HookReader; throws where it is none.
HookReader& hook_reader_of(pybind11::handle object);

// Defines the type HookReader, and what makes one.
//
// hook_reader(seen, slots, depth) -> HookReader
//   .read(tensor, index, site, call, step, seq, flags, any_dtype) -> int
//   .add_device(tensor)
//   .set_depth(depth)
void define_hook_reader(pybind11::module_& m);

}  // namespace fastcheck
