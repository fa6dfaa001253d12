// The launchers of csrc/cuda/start.h, with the kernels of the PTX modules that were loaded; and
// what a launch may touch, from its arguments.
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <typeinfo>
#include <utility>

#include "cuda/found_nonfinite.cuh"
#include "cuda/merge.cuh"
#include "cuda/record_and_exponents.cuh"
#include "cuda/records.cuh"
#include "cuda/start.h"
#include "ptx_on_cpu/machine.h"

namespace {

using fastcheck::DType;
using fastcheck::Partial;
using fastcheck::Record;
using fastcheck::Sums;
using namespace fastcheck::cuda;
using ptx_on_cpu::Range;
using ptx_on_cpu::Use;

std::vector<std::unique_ptr<ptx_on_cpu::Module>> modules;
std::string load_error;

// ---- ranges -------------------------------------------------------------------------------------

class Ranges {
 public:
  void add(const void* begin, std::int64_t bytes, Use use, const char* name) {
    if (begin == nullptr || bytes == 0) return;
    const auto at = reinterpret_cast<std::uintptr_t>(begin);
    list_.push_back({at, at + static_cast<std::uintptr_t>(bytes), use, name});
  }

  // The tensors, and the table that lists them. The first and the last byte that a layout reaches.
  void add(const List& list, int component_size) {
    const Entry* entries = list.table != nullptr ? list.table : list.entries;
    if (list.table != nullptr) {
      add(list.table, list.count * static_cast<std::int64_t>(sizeof(Entry)), Use::kRead,
          "the table");
    }
    for (int i = 0; i < list.count; ++i) add(entries[i], list.strided.layout, component_size);
  }

  void add(const OneTensor& one, int component_size) { add(one.entry, {}, component_size); }

  void add(const Entry& entry, const Layout& layout, int component_size) {
    std::int64_t bytes = entry.components * component_size;
    if (entry.strided != 0 && bytes > 0) {
      bytes = layout.inner_bytes;
      for (int d = 0; d < layout.outer_dims; ++d)
        bytes += (layout.sizes[d] - 1) * layout.stride_bytes[d];
    }
    add(entry.data, bytes, Use::kRead, "a tensor");
  }

  template <class Tensors>
  void add(const RecordsLaunch<Tensors>& launch, int component_size) {
    const Tensors& list = launch.list;
    add(list, component_size);
    const Entry* entries = entries_of(list);
    int count = 1;
    if constexpr (std::is_same_v<Tensors, List>) count = list.count;
    for (int i = 0; i < count; ++i)
      add(launch.slots + entries[i].slot, sizeof(Record), Use::kWrite, "a slot");
    add(launch.counters, count * std::int64_t{sizeof(Counter)}, Use::kState, "the counters");
    add(launch.partials, list.chunks * std::int64_t{sizeof(Partial)}, Use::kScratch,
        "the partials");
    if (launch.box.box != nullptr) {
      add(launch.box.box, sizeof(BlackBox), Use::kBox, "the black box");
      add(launch.box.claims, kBoxStretches * std::int64_t{8}, Use::kState, "the box's claims");
    }
    add(launch.partials + list.chunks, list.chunks * std::int64_t{sizeof(Sums)}, Use::kScratch,
        "the levels");
  }

  template <class Format>
  void add_counts(const CountsArgument& counts) {
    add(counts.words, fastcheck::kExponentWords * std::int64_t{8}, Use::kWrite, "the words");
    add(counts.totals, kTotals<Format> * std::int64_t{8}, Use::kState, "the totals");
    add(counts.blocks_done, sizeof(Counter), Use::kState, "the count of blocks");
  }

  std::vector<Range> take(const ptx_on_cpu::Module& module) {
    for (const auto& [name, data] : module.globals) {
      add(data.data(), static_cast<std::int64_t>(data.size()), Use::kRead, "a constant");
    }
    return std::move(list_);
  }

 private:
  std::vector<Range> list_;
};

// ---- names --------------------------------------------------------------------------------------

// In a longer name whose first namespace is fastcheck too.
template <class Component>
std::string mangled() {
  const std::string name = typeid(Component).name();
  const std::string scope = "N9fastcheck";
  if (name.compare(0, scope.size(), scope) != 0) throw std::runtime_error(name);
  return "NS_" + name.substr(scope.size());
}

cudaError_t refuse(const std::string& why) {
  cuda_on_cpu::set_error_message(why);
  return cudaErrorLaunchFailure;
}

template <class Component, class Shared, class Launch>
cudaError_t start(const std::string& entry, unsigned grid, unsigned block, const Launch& launch) {
  for (const auto& module : modules) {
    const auto found = module->function_by_name.find(entry);
    if (found == module->function_by_name.end()) continue;
    const ptx_on_cpu::Function& kernel = module->functions[static_cast<std::size_t>(found->second)];
    if (kernel.argument_bytes != sizeof(Launch)) return refuse(entry + " takes other arguments");
    Ranges ranges;
    if constexpr (std::is_same_v<Launch, ExponentsLaunch>) {
      ranges.add(launch.entry, launch.layout, Shape<Component>::kSize);
      ranges.add_counts<Component>(launch.counts);
    } else if constexpr (std::is_same_v<Launch, RecordAndExponentsLaunch>) {
      ranges.add(launch.record, Shape<Component>::kSize);
      ranges.add_counts<Component>(launch.counts);
    } else if constexpr (!std::is_same_v<Launch, FoundLaunch>) {
      ranges.add(launch, Shape<Component>::kSize);
    } else {
      ranges.add(launch.list, Shape<Component>::kSize);
      ranges.add(launch.found, sizeof(*launch.found), Use::kWrite, "found");
    }
    const bool ok = ptx_on_cpu::run(*module, kernel, grid, block, shared_bytes<Shared>(block),
                                    &launch, ranges.take(*module));
    return ok ? cudaSuccess : cudaErrorLaunchFailure;
  }
  return refuse("no kernel " + entry + " was loaded");
}

}  // namespace

namespace fastcheck::cuda {

template <class Component>
cudaError_t find_records() {
  return cudaSuccess;
}
template <class Format>
cudaError_t find_found_nonfinite() {
  return cudaSuccess;
}

template <class Component, class Tensors>
cudaError_t start_records(Depth depth, unsigned grid, unsigned block, cudaStream_t,
                          const RecordsLaunch<Tensors>& launch) {
  return start<Component, BlockShared<Component>>(
      "_ZN9fastcheck4cuda14records_kernelI" + mangled<Component>() + "LNS_5DepthE" +
          std::to_string(static_cast<int>(depth)) +
          (std::is_same_v<Tensors, List> ? "ENS0_4List" : "ENS0_9OneTensor") +
          "EEEvNS0_13RecordsLaunchIT1_EE",
      grid, block, launch);
}

template <class Format>
cudaError_t start_found_nonfinite(unsigned grid, unsigned block, cudaStream_t,
                                  const FoundLaunch& launch) {
  return start<Format, FoundShared<Format>>(
      "_ZN9fastcheck4cuda22found_nonfinite_kernelI" + mangled<Format>() + "EEvNS0_11FoundLaunchE",
      grid, block, launch);
}

template <class Format>
cudaError_t find_exponents() {
  return cudaSuccess;
}
template <class Format>
cudaError_t find_record_and_exponents() {
  return cudaSuccess;
}

template <class Format>
cudaError_t start_exponents(unsigned grid, unsigned block, cudaStream_t,
                            const ExponentsLaunch& launch) {
  return start<Format, ExponentShared<Format>>(
      "_ZN9fastcheck4cuda16exponents_kernelI" + mangled<Format>() + "EEvNS0_15ExponentsLaunchE",
      grid, block, launch);
}

template <class Format>
cudaError_t start_record_and_exponents(unsigned grid, unsigned block, cudaStream_t,
                                       const RecordAndExponentsLaunch& launch) {
  return start<Format, RecordAndExponentsShared<Format>>(
      "_ZN9fastcheck4cuda27record_and_exponents_kernelI" + mangled<Format>() +
          "EEvNS0_24RecordAndExponentsLaunchE",
      grid, block, launch);
}

#define FASTCHECK_RECORDS_OF(component, tensors)                                         \
  template cudaError_t start_records<component>(Depth, unsigned, unsigned, cudaStream_t, \
                                                const RecordsLaunch<tensors>&);
#define FASTCHECK_RECORDS(component)              \
  template cudaError_t find_records<component>(); \
  FASTCHECK_RECORDS_OF(component, List)
#define FASTCHECK_FOUND(format)                                                        \
  template cudaError_t find_found_nonfinite<format>();                                 \
  template cudaError_t start_found_nonfinite<format>(unsigned, unsigned, cudaStream_t, \
                                                     const FoundLaunch&);
#define FASTCHECK_EXPONENTS(format)                                                         \
  template cudaError_t find_exponents<format>();                                            \
  template cudaError_t find_record_and_exponents<format>();                                 \
  template cudaError_t start_exponents<format>(unsigned, unsigned, cudaStream_t,            \
                                               const ExponentsLaunch&);                     \
  template cudaError_t start_record_and_exponents<format>(unsigned, unsigned, cudaStream_t, \
                                                          const RecordAndExponentsLaunch&);
#define FASTCHECK_FORMAT(format) \
  FASTCHECK_RECORDS(format) FASTCHECK_FOUND(format) FASTCHECK_EXPONENTS(format)

FASTCHECK_FORMAT(Float64)
FASTCHECK_FORMAT(Float32)
FASTCHECK_FORMAT(Float16)
FASTCHECK_FORMAT(BFloat16)
FASTCHECK_FORMAT(Float8E4M3FN)
FASTCHECK_FORMAT(Float8E5M2)
FASTCHECK_RECORDS(Integer<std::int8_t>)
FASTCHECK_RECORDS(Integer<std::int16_t>)
FASTCHECK_RECORDS(Integer<std::int32_t>)
FASTCHECK_RECORDS(Integer<std::int64_t>)
FASTCHECK_RECORDS(Integer<std::uint8_t>)
FASTCHECK_RECORDS(Integer<std::uint16_t>)
FASTCHECK_RECORDS(Integer<std::uint32_t>)
FASTCHECK_RECORDS(Integer<std::uint64_t>)
FASTCHECK_RECORDS(Boolean)
FASTCHECK_RECORDS_OF(Float32, OneTensor)
FASTCHECK_RECORDS_OF(Float16, OneTensor)
FASTCHECK_RECORDS_OF(BFloat16, OneTensor)

}  // namespace fastcheck::cuda

extern "C" {

void ptx_on_cpu_unload() { modules.clear(); }

// Reads a file of nvcc's; null, or what is wrong with it.
const char* ptx_on_cpu_load(const char* path) {
  try {
    std::ostringstream text;
    text << std::ifstream(path).rdbuf();
    const std::string name = path;
    auto module = std::make_unique<ptx_on_cpu::Module>(
        ptx_on_cpu::parse(name.substr(name.rfind('/') + 1), text.str()));
    modules.push_back(std::move(module));
    return nullptr;
  } catch (const std::exception& error) {
    load_error = error.what();
    return load_error.c_str();
  }
}

// What ran since the last call.
void ptx_on_cpu_count(std::int64_t* launches, std::int64_t* longest) {
  const ptx_on_cpu::Count count = std::exchange(ptx_on_cpu::counted, {});
  *launches = count.launches, *longest = count.longest;
}

// Runs a kernel of tests/fakes/ptx_on_cpu/intrinsics.cu; null, or what went wrong.
const char* ptx_on_cpu_probe(const char* entry, const std::uint32_t* x, const std::uint32_t* y,
                             std::uint32_t* out, std::int64_t count) {
  const struct {
    const std::uint32_t* x;
    const std::uint32_t* y;
    std::uint32_t* out;
    std::int64_t count;
  } arguments{x, y, out, count};
  for (const auto& module : modules) {
    const auto found = module->function_by_name.find(entry);
    if (found == module->function_by_name.end()) continue;
    Ranges ranges;
    const std::int64_t bytes = count * std::int64_t{sizeof(*x)};
    ranges.add(x, bytes, Use::kRead, "x");
    ranges.add(y, bytes, Use::kRead, "y");
    ranges.add(out, bytes, Use::kWrite, "out");
    const ptx_on_cpu::Function& kernel = module->functions[static_cast<std::size_t>(found->second)];
    const bool ok = ptx_on_cpu::run(*module, kernel, 1, 32, 0, &arguments, ranges.take(*module));
    return ok ? nullptr : cuda_on_cpu::error_message();
  }
  return "no such kernel";
}
}
