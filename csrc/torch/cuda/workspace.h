// The buffers of the CUDA kernels' launches: one set per stream, kept, and grown when need be.
#pragma once

#include <ATen/core/Tensor.h>

#include <mutex>

#include "cuda/launch.h"

namespace fastcheck::cuda {

struct StreamBuffers;

// A launch's hold on the buffers of a stream. The device must be current, and stay so.
//
// Launches on one stream run one after the other, so they share buffers, and the memory is torch's,
// allocated on that stream. While a graph is captured, memory is taken from the graph's pool for
// this hold alone and given back to that pool: what is captured later may use it again, in the
// order of the stream, and nothing outside the graph does.
class Workspaces {
 public:
  Workspaces(c10::Device device, void* stream);
  ~Workspaces();
  Workspaces(const Workspaces&) = delete;
  Workspaces& operator=(const Workspaces&) = delete;

  const Tuning& tuning() const { return tuning_; }
  // The number of tensors that a launch may have. A graph's replay would read a table again, from
  // pinned memory that is used for something else by then: under capture lists go in parts.
  std::size_t most_tensors() const;
  // Buffers of at least this size, until the next call.
  Workspace fit(const WorkspaceSize& size);

 private:
  void mark_table();
  void follow_stream(void* stream);

  c10::Device device_;
  std::unique_lock<std::mutex> lock_;
  Tuning tuning_{};
  bool is_capturing_ = false;
  bool is_external_ = false;
  StreamBuffers* kept_ = nullptr;
  at::Tensor counters_, partials_;  // under capture
  std::ptrdiff_t table_ = -1;       // that of the launch since the last fit(), in kept_
};

}  // namespace fastcheck::cuda
