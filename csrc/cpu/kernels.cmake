# The CPU kernels: no torch, no Python. tests/fakes/neon builds them by this file for another machine.

# The canonical order fixes how sums are rounded: nothing may be contracted, reordered or flushed.
set(FASTCHECK_OPTIONS -Wall -Wextra -ffp-contract=off -fno-fast-math -fno-math-errno)

# Wide vectors never leave their file, so their calling convention is of no concern (-Wno-psabi), nor
# are attributes lost in templates; the uninitialised and bounds warnings of gcc 12 are about its own intrinsics,
# and about a last row that is not there.
set(FASTCHECK_VECTOR_OPTIONS -Wno-psabi -Wno-ignored-attributes -Wno-uninitialized -Wno-array-bounds
  $<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized>)

function(fastcheck_vector_source name)
  target_sources(fastcheck_cpu PRIVATE ${CMAKE_CURRENT_FUNCTION_LIST_DIR}/${name}.cpp)
  set_source_files_properties(${CMAKE_CURRENT_FUNCTION_LIST_DIR}/${name}.cpp PROPERTIES
    COMPILE_OPTIONS "${ARGN};${FASTCHECK_VECTOR_OPTIONS}")
endfunction()

function(fastcheck_vector_kernel name)
  fastcheck_vector_source(kernel_${name} ${ARGN})
endfunction()

add_library(fastcheck_cpu OBJECT
  ${CMAKE_CURRENT_LIST_DIR}/cpu_features.cpp
  ${CMAKE_CURRENT_LIST_DIR}/dispatch.cpp
  ${CMAKE_CURRENT_LIST_DIR}/exponents.cpp
  ${CMAKE_CURRENT_LIST_DIR}/exponents_scalar.cpp
  ${CMAKE_CURRENT_LIST_DIR}/gather.cpp
  ${CMAKE_CURRENT_LIST_DIR}/kernel_scalar.cpp
  ${CMAKE_CURRENT_LIST_DIR}/reduce.cpp)
target_include_directories(fastcheck_cpu PUBLIC ${CMAKE_CURRENT_LIST_DIR}/..)
target_compile_options(fastcheck_cpu PRIVATE ${FASTCHECK_OPTIONS} -O3)

if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64)$")
  fastcheck_vector_kernel(avx2 -mavx2 -mfma -mf16c)
  fastcheck_vector_kernel(avx512 -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx2 -mfma -mf16c
    -mprefer-vector-width=512)
  fastcheck_vector_kernel(avx512_vnni -mavx512vnni -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx2 -mfma -mf16c
    -mprefer-vector-width=512)
  fastcheck_vector_kernel(avx512_vbmi -mavx512vbmi -mavx512vnni -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx2
    -mfma -mf16c -mprefer-vector-width=512 -mtune=icelake-server)
  fastcheck_vector_source(exponents_avx2 -mavx2 -mpopcnt)
  fastcheck_vector_source(exponents_avx512 -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx2 -mpopcnt
    -mprefer-vector-width=512)
elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "^(aarch64|arm64)$")
  fastcheck_vector_kernel(neon)
  fastcheck_vector_source(exponents_neon)
else()
  message(FATAL_ERROR "fastcheck's kernels know x86_64 and aarch64, and this is '${CMAKE_SYSTEM_PROCESSOR}'; "
    "fastcheck works without the extension there: put its folder python on PYTHONPATH")
endif()
