// Links this library to the kernels of fastcheck._kernels.
#pragma once

namespace fastcheck {

// Before any kernel is used. Throws std::runtime_error where fastcheck._kernels can't be imported
// or is of another build.
void import_kernels();

}  // namespace fastcheck
