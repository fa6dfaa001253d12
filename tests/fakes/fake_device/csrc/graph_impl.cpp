// The backend interface of torch.accelerator.Graph, for torch releases that have it.
#include "runtime.h"

#if __has_include(<ATen/core/GraphImplInterface.h>)
#include <ATen/core/GraphImplInterface.h>
#include <c10/core/DeviceType.h>
#include <c10/util/Exception.h>

namespace {

struct Impl final : at::GraphImplInterface {
  explicit Impl(const at::GraphImplArgs& args) {
    TORCH_CHECK_NOT_IMPLEMENTED(!args.keep_graph, "fake device: keep_graph");
  }
  void capture_begin(at::MempoolId_t /*pool*/, at::GraphCaptureMode mode) override {
    graph.capture_begin(mode == at::GraphCaptureMode::ThreadLocal ? fake::CaptureMode::thread_local_
                        : mode == at::GraphCaptureMode::Relaxed   ? fake::CaptureMode::relaxed
                                                                  : fake::CaptureMode::global);
  }
  void capture_end() override { graph.capture_end(); }
  void instantiate() override {}
  void replay() override { graph.replay(); }
  void reset() override { graph.reset(); }
  at::MempoolId_t pool() const override { return {0, 0}; }
  void enable_debug_mode() override {}
  void debug_dump(const std::string& /*path*/) override {
    TORCH_CHECK_NOT_IMPLEMENTED(false, "fake device: debug_dump");
  }

  fake::Graph graph;
};

}  // namespace

void fake::register_graphs() {
  at::GraphImplRegistry()->Register(
      c10::DeviceTypeName(c10::DeviceType::PrivateUse1, false),
      [](const at::GraphImplArgs& args) -> std::unique_ptr<at::GraphImplInterface> {
        return std::make_unique<Impl>(args);
      });
}

#else

void fake::register_graphs() {}

#endif
