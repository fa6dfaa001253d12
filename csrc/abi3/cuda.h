// The functions of fastcheck._kernels that read CUDA tensors.
#pragma once

#include <Python.h>

namespace fastcheck::abi3 {

// Methods, without the entry that ends a table.
extern const PyMethodDef kCudaMethods[];
extern const int kCudaMethodCount;

}  // namespace fastcheck::abi3
