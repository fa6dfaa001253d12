// The kernel that counts the exponents of float32 and nothing else: compiles in seconds, for tests
// that change a line.
#include "cuda/exponents.cuh"

namespace fastcheck::cuda {

template __global__ void exponents_kernel<Float32>(FASTCHECK_ARGUMENT ExponentsLaunch);

}  // namespace fastcheck::cuda
