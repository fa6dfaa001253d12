// The CUDA part of fastcheck._C, compiled as it is.
#include "torch/binding/cuda_module.h"

PYBIND11_MODULE(cuda_on_fake_C, m) { fastcheck::cuda::define_functions(m); }
