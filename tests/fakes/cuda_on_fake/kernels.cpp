// The CUDA part of fastcheck._kernels, compiled as it is.
#include <Python.h>

#include <vector>

#include "abi3/cuda.h"

PyMODINIT_FUNC PyInit_cuda_on_fake_kernels() {
  using namespace fastcheck::abi3;
  static std::vector<PyMethodDef> methods(kCudaMethods, kCudaMethods + kCudaMethodCount);
  methods.push_back({nullptr, nullptr, 0, nullptr});
  static PyModuleDef definition{PyModuleDef_HEAD_INIT,
                                "cuda_on_fake_kernels",
                                nullptr,
                                -1,
                                methods.data(),
                                nullptr,
                                nullptr,
                                nullptr,
                                nullptr};
  return PyModule_Create(&definition);
}
