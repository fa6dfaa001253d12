// Each function of cuda/intrinsics.cuh that has a branch for the GPU, over arrays: as a kernel, and
// through a host compiler (-DPLAIN) as the plain code that it must equal.
#include "cuda/intrinsics.cuh"

namespace {

using namespace fastcheck::cuda;
using fastcheck::bit_cast;

FASTCHECK_DEVICE std::uint32_t permute(std::uint32_t x, std::uint32_t y) {
  return permute_bytes(x, ~x, y);
}
FASTCHECK_DEVICE std::uint32_t max_float(std::uint32_t x, std::uint32_t y) {
  return bit_cast<std::uint32_t>(max_or_nan(bit_cast<float>(x), bit_cast<float>(y)));
}
FASTCHECK_DEVICE std::uint32_t half_value(std::uint32_t x, std::uint32_t) {
  return bit_cast<std::uint32_t>(half_to_float(x));
}
FASTCHECK_DEVICE std::uint32_t times_256(std::uint32_t x, std::uint32_t) {
  return halves_times_256(x);
}
FASTCHECK_DEVICE std::uint32_t e4m3(std::uint32_t x, std::uint32_t y) {
  return y % 2 == 0 ? halves_of_e4m3<0>(x) : halves_of_e4m3<1>(x);
}
FASTCHECK_DEVICE std::uint32_t dots(std::uint32_t x, std::uint32_t y) {
  return dot_unsigned(x, y, 7) ^ static_cast<std::uint32_t>(dot_signed(x, y, -7)) << 1;
}

#define OF_TWO(name)                                                           \
  FASTCHECK_DEVICE std::uint32_t of_##name(std::uint32_t x, std::uint32_t y) { \
    float a = bit_cast<float>(x), b = bit_cast<float>(y);                      \
    name(a, b, bit_cast<float>(y), bit_cast<float>(y));                        \
    return bit_cast<std::uint32_t>(a) ^ bit_cast<std::uint32_t>(b) << 1;       \
  }
OF_TWO(add_two)
OF_TWO(multiply_two)
OF_TWO(add_two_squares)

struct Arguments {
  const std::uint32_t* x;
  const std::uint32_t* y;
  std::uint32_t* out;
  std::int64_t count;
};

}  // namespace

#if defined(PLAIN)
#define PROBE(name, function)                                                                      \
  extern "C" void plain_##name(const std::uint32_t* x, const std::uint32_t* y, std::uint32_t* out, \
                               std::int64_t count) {                                               \
    for (std::int64_t i = 0; i < count; ++i) out[i] = function(x[i], y[i]);                        \
  }
#else
#define PROBE(name, function)                                                              \
  extern "C" __global__ void device_##name(const __grid_constant__ Arguments a) {          \
    const std::int64_t step = gridDim.x * blockDim.x;                                      \
    for (std::int64_t i = blockIdx.x * blockDim.x + threadIdx.x; i < a.count; i += step) { \
      a.out[i] = function(a.x[i], a.y[i]);                                                 \
    }                                                                                      \
  }
#endif

PROBE(permute, permute)
PROBE(dots, dots)
PROBE(max_brain, max_or_nan<true>)
PROBE(max_half, max_or_nan<false>)
PROBE(min_brain, min_number<true>)
PROBE(min_half, min_number<false>)
PROBE(magnitude_brain, min_magnitude<true>)
PROBE(magnitude_half, min_magnitude<false>)
PROBE(max_float, max_float)
PROBE(half_value, half_value)
PROBE(times_256, times_256)
PROBE(e4m3, e4m3)
PROBE(two_sums, of_add_two)
PROBE(two_products, of_multiply_two)
PROBE(two_squares, of_add_two_squares)
