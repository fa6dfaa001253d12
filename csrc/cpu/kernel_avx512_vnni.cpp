// The vector kernel for 8-bit integers, compiled with AVX-512 and VNNI: bytes are added up, and
// squared, in one instruction. Other dtypes have the functions of AVX-512 alone.
#include "cpu/kernel.h"
//
#include "cpu/vector_avx512.h"
//
#include "cpu/vector_kernel.h"

namespace fastcheck::cpu {
namespace {

template <class Component>
void replace(KernelSet& set, DType dtype) {
  ReduceTiles(&row)[kDepthCount] = set.reduce[static_cast<int>(dtype)];
  row[0] = Reduce<Component, Depth::kHealth>::run;
  row[1] = Reduce<Component, Depth::kStats>::run;
  row[2] = Reduce<Component, Depth::kFull>::run;
}

KernelSet with_vnni(KernelSet set) {
  set.name = "avx512_vnni";
  replace<Integer<std::int8_t>>(set, DType::k_int8);
  replace<Integer<std::uint8_t>>(set, DType::k_uint8);
  return set;
}

}  // namespace

const KernelSet* avx512_vnni_kernels() {
  static const KernelSet kSet = with_vnni(*avx512_kernels());
  return &kSet;
}

}  // namespace fastcheck::cpu
