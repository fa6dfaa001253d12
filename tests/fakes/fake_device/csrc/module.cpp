// The controls that tests use, for Python. No torch headers: streams are (device, id) pairs here.
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "runtime.h"

namespace py = pybind11;

namespace {

py::dict counts_as_dict(const fake::Counts& counts) {
  py::dict result;
  for (int i = 0; i < fake::kCounters; ++i)
    result[fake::name_of(static_cast<fake::Counter>(i))] = counts[i];
  return result;
}

// A Python callable that can be dropped by a worker thread.
std::shared_ptr<py::function> shared(py::function function) {
  return {new py::function(std::move(function)), [](py::function* held) {
            const py::gil_scoped_acquire gil;
            delete held;
          }};
}

void without_gil(const std::function<void()>& wait) {
  if (PyGILState_Check() == 0) {
    wait();
    return;
  }
  const py::gil_scoped_release release;
  wait();
}

}  // namespace

PYBIND11_MODULE(fake_device_C, m) {
  using Release = py::call_guard<py::gil_scoped_release>;
  fake::set_around_wait(&without_gil);
  m.attr("DEVICES") = fake::kDevices;
  m.def("counters", [] {
    fake::Counts sum{};
    for (const auto& entry : fake::counts_by_thread())
      for (int i = 0; i < fake::kCounters; ++i) sum[i] += entry.second[i];
    return counts_as_dict(sum);
  });
  m.def("counters_of", [](std::uint64_t thread) {
    const auto all = fake::counts_by_thread();
    const auto found = all.find(thread);
    return counts_as_dict(found == all.end() ? fake::Counts{} : found->second);
  });
  m.def("reset_counters", &fake::reset_counts);
  m.def("synchronisation_names", [] {
    std::vector<std::string> names;
    for (int i = 0; i < fake::kCounters; ++i)
      if (fake::is_synchronisation(static_cast<fake::Counter>(i)))
        names.emplace_back(fake::name_of(static_cast<fake::Counter>(i)));
    return names;
  });
  m.def("set_sync_debug", &fake::set_sync_debug);
  m.def("sync_debug", &fake::sync_debug);

  m.def("set_delay", [](int d, int s, std::int64_t us) { fake::stream(d, s).set_delay(us); });
  m.def("set_default_delay", &fake::set_default_delay);
  m.def("hold", [](int d, int s) { fake::stream(d, s).hold(); });
  m.def("release", [](int d, int s) { fake::stream(d, s).release(); });
  m.def("advance", [](int d, int s, std::int64_t n) { fake::stream(d, s).advance(n); });
  m.def("held", [](int d, int s) { return fake::stream(d, s).held(); });
  m.def("streams", [](int d) {
    std::vector<int> ids;
    for (fake::Stream* each : fake::all_streams(d)) ids.push_back(each->id());
    return ids;
  });
  m.def("is_capturing", [](int d, int s) { return fake::stream(d, s).capture() != nullptr; });
  m.def("register_graphs", &fake::register_graphs);
  m.def("native_handle",
        [](int d, int s) { return reinterpret_cast<std::uintptr_t>(&fake::stream(d, s)); });
  m.def("launch", [](int d, int s, const std::string& name, py::function function) {
    auto held = shared(std::move(function));
    const py::gil_scoped_release release;
    fake::stream(d, s).submit(fake::TaskKind::kernel, name, [held = std::move(held)] {
      const py::gil_scoped_acquire gil;
      (*held)();
    });
  });
  m.def("lose", [](int d, int s, const std::string& message) {
    fake::lose_device(fake::stream(d, s), message);
  });
  m.def("find_again", &fake::find_device_again);
  m.def("record_launches", &fake::record_launches);
  m.def("take_launches", &fake::take_launches);

  m.def("current_device", &fake::current_device);
  m.def("set_device", &fake::set_current_device);
  m.def("current_stream", &fake::current_stream);
  m.def("set_stream", &fake::set_current_stream);
  m.def(
      "synchronize",
      [](int device) {
        fake::count_synchronisation(fake::Counter::device_synchronize);
        fake::synchronize_device(device);
      },
      Release());
  m.def("shutdown", &fake::shutdown, Release());

  m.def("empty_cache", &fake::empty_cache, Release());
  m.def("memory_stats", [](int device) {
    const fake::MemoryStats now = fake::memory_stats(device);
    py::dict result;
    result["allocated"] = now.allocated;
    result["allocated_peak"] = now.allocated_peak;
    result["reserved"] = now.reserved;
    result["reserved_peak"] = now.reserved_peak;
    result["limit"] = now.limit;
    return result;
  });
  m.def("reset_peaks", &fake::reset_peaks);
  m.def("set_memory_limit", &fake::set_memory_limit);
  m.def("set_poison", &fake::set_poison);
}
