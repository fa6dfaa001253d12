# Sets FASTCHECK_TORCH_{VERSION,INCLUDES,LIBRARIES,ABI,CUDA} of the torch that is installed.

# torch is asked rather than found: its CMake package of a CUDA build insists on a CUDA toolkit, which
# a library that links only its CPU half has no use for.
execute_process(
  COMMAND ${Python_EXECUTABLE} -c "import torch, torch.utils.cpp_extension as e; print(torch.__version__, ';'.join(e.include_paths()), ';'.join(e.library_paths()), int(torch.compiled_with_cxx11_abi()), torch.version.cuda, sep='\\n')"
  OUTPUT_VARIABLE FASTCHECK_TORCH
  ERROR_VARIABLE FASTCHECK_TORCH_ERROR
  OUTPUT_STRIP_TRAILING_WHITESPACE
  RESULT_VARIABLE FASTCHECK_TORCH_RESULT)
if(NOT FASTCHECK_TORCH_RESULT EQUAL 0)
  message(FATAL_ERROR "fastcheck is built against the torch that is installed, and there is none that "
    "${Python_EXECUTABLE} can import. Install torch first, then: pip install --no-build-isolation .\n${FASTCHECK_TORCH_ERROR}")
endif()
string(REPLACE ";" "\\;" FASTCHECK_TORCH "${FASTCHECK_TORCH}")
string(REPLACE "\n" ";" FASTCHECK_TORCH "${FASTCHECK_TORCH}")
list(GET FASTCHECK_TORCH 0 FASTCHECK_TORCH_VERSION)
list(GET FASTCHECK_TORCH 1 FASTCHECK_TORCH_INCLUDES)
list(GET FASTCHECK_TORCH 2 FASTCHECK_TORCH_LIBRARIES)
list(GET FASTCHECK_TORCH 3 FASTCHECK_TORCH_ABI)
list(GET FASTCHECK_TORCH 4 FASTCHECK_TORCH_CUDA)  # None of a build without
message(STATUS "fastcheck: torch ${FASTCHECK_TORCH_VERSION}")
