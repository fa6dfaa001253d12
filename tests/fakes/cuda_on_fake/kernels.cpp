// The CUDA part of fastcheck._kernels, compiled as it is.
#include <Python.h>

#include "abi3/cuda.h"
#include "abi3/new_module.h"

PyMODINIT_FUNC PyInit_cuda_on_fake_kernels() {
  using namespace fastcheck::abi3;
  return new_module("cuda_on_fake_kernels", nullptr,
                    {kCudaMethods, kCudaMethods + kCudaMethodCount});
}
