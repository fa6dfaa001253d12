# _C: hooks and observers, built for one release of torch. Its kernels are those of _kernels.

find_package(pybind11 CONFIG REQUIRED)

pybind11_add_module(_C MODULE NO_EXTRAS
  ${CMAKE_CURRENT_LIST_DIR}/binding/cuda_module.cpp
  ${CMAKE_CURRENT_LIST_DIR}/binding/module.cpp
  ${CMAKE_CURRENT_LIST_DIR}/binding/ops.cpp
  ${CMAKE_CURRENT_LIST_DIR}/cuda/black_box.cpp
  ${CMAKE_CURRENT_LIST_DIR}/cuda/device.cpp
  ${CMAKE_CURRENT_LIST_DIR}/cuda/observe.cpp
  ${CMAKE_CURRENT_LIST_DIR}/cuda/workspace.cpp
  ${CMAKE_CURRENT_LIST_DIR}/dump/call_names.cpp
  ${CMAKE_CURRENT_LIST_DIR}/dump/json_text.cpp
  ${CMAKE_CURRENT_LIST_DIR}/dump/module.cpp
  ${CMAKE_CURRENT_LIST_DIR}/dump/op_arguments.cpp
  ${CMAKE_CURRENT_LIST_DIR}/dump/op_mode.cpp
  ${CMAKE_CURRENT_LIST_DIR}/dump/op_recorder.cpp
  ${CMAKE_CURRENT_LIST_DIR}/dump/read_cache.cpp
  ${CMAKE_CURRENT_LIST_DIR}/hooks/call.cpp
  ${CMAKE_CURRENT_LIST_DIR}/hooks/flatten.cpp
  ${CMAKE_CURRENT_LIST_DIR}/hooks/held_locals.cpp
  ${CMAKE_CURRENT_LIST_DIR}/hooks/last_nodes.cpp
  ${CMAKE_CURRENT_LIST_DIR}/hooks/module_recorder.cpp
  ${CMAKE_CURRENT_LIST_DIR}/hooks/reader.cpp
  ${CMAKE_CURRENT_LIST_DIR}/hooks/recorder.cpp
  ${CMAKE_CURRENT_LIST_DIR}/hooks/stored.cpp
  ${CMAKE_CURRENT_LIST_DIR}/kernels/imported.cpp
  ${CMAKE_CURRENT_LIST_DIR}/op_level/arrivals.cpp
  ${CMAKE_CURRENT_LIST_DIR}/op_level/device_launches.cpp
  ${CMAKE_CURRENT_LIST_DIR}/op_level/forward_ops.cpp
  ${CMAKE_CURRENT_LIST_DIR}/op_level/line_numbers.cpp
  ${CMAKE_CURRENT_LIST_DIR}/op_level/module.cpp
  ${CMAKE_CURRENT_LIST_DIR}/op_level/op_observer.cpp
  ${CMAKE_CURRENT_LIST_DIR}/op_level/op_reading.cpp
  ${CMAKE_CURRENT_LIST_DIR}/op_level/op_results.cpp
  ${CMAKE_CURRENT_LIST_DIR}/op_level/provenance.cpp
  ${CMAKE_CURRENT_LIST_DIR}/op_level/readability.cpp
  ${CMAKE_CURRENT_LIST_DIR}/op_level/scopes.cpp
  ${CMAKE_CURRENT_LIST_DIR}/operators/filter.cpp
  ${CMAKE_CURRENT_LIST_DIR}/operators/op_table.cpp
  ${CMAKE_CURRENT_LIST_DIR}/python/cursor.cpp
  ${CMAKE_CURRENT_LIST_DIR}/python/line.cpp
  ${CMAKE_CURRENT_LIST_DIR}/python/lock.cpp
  ${CMAKE_CURRENT_LIST_DIR}/python/observe.cpp
  ${CMAKE_CURRENT_LIST_DIR}/python/rows.cpp
  ${CMAKE_CURRENT_LIST_DIR}/python/tensors.cpp
  ${CMAKE_CURRENT_LIST_DIR}/read/observe.cpp
  ${CMAKE_CURRENT_LIST_DIR}/read/seen_tensors.cpp
  ${CMAKE_CURRENT_LIST_DIR}/read/slots.cpp
  ${CMAKE_CURRENT_LIST_DIR}/read/tensor_view.cpp
  ${CMAKE_CURRENT_LIST_DIR}/read/waiting.cpp)
target_include_directories(_C PRIVATE ${CMAKE_CURRENT_LIST_DIR}/..)
target_link_libraries(_C PRIVATE ${CMAKE_DL_LIBS})
target_compile_options(_C PRIVATE ${FASTCHECK_OPTIONS} -O2)
if(FASTCHECK_TORCH_VERSION VERSION_GREATER_EQUAL 2.14)  # its headers need C++20
  set_target_properties(_C PROPERTIES CXX_STANDARD 20)
endif()
# at::parallel_for is a template: without OpenMP where it is compiled it is a plain loop. Nothing is linked
# for it, so that the threads are those of torch's own runtime, which is g++'s: what clang compiles needs its own.
target_compile_options(_C PRIVATE $<$<CXX_COMPILER_ID:GNU>:-fopenmp>)
# Most of the time goes into the headers of torch and pybind11, which all files include: several
# folders are compiled as one file, in two of about the same length. With OFF each file is: an edit
# compiles less, all takes longer.
option(FASTCHECK_UNITY "Compile the folders of csrc/torch as a few files" ON)
set_target_properties(_C PROPERTIES UNITY_BUILD ${FASTCHECK_UNITY} UNITY_BUILD_MODE GROUP)
get_target_property(FASTCHECK_SOURCES _C SOURCES)
foreach(source IN LISTS FASTCHECK_SOURCES)
  if(source MATCHES "/(dump|hooks)/")
    set(group hooks)
  else()
    set(group operators)
  endif()
  set_source_files_properties(${source} PROPERTIES UNITY_GROUP ${group})
endforeach()
# It includes headers of CPython's own, which other files can't.
set_source_files_properties(${CMAKE_CURRENT_LIST_DIR}/python/line.cpp PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
# torch's headers then declare the operators that they use in place of all, which take seconds in each file.
target_compile_definitions(_C PRIVATE AT_PER_OPERATOR_HEADERS _GLIBCXX_USE_CXX11_ABI=${FASTCHECK_TORCH_ABI})
target_include_directories(_C SYSTEM PRIVATE ${FASTCHECK_TORCH_INCLUDES})
foreach(library torch_python torch_cpu c10)
  find_library(FASTCHECK_LIB_${library} ${library} PATHS ${FASTCHECK_TORCH_LIBRARIES} NO_DEFAULT_PATH REQUIRED)
  target_link_libraries(_C PRIVATE ${FASTCHECK_LIB_${library}})
endforeach()
set_target_properties(_C PROPERTIES LINKER_LANGUAGE CXX)
# torch is loaded before _C, so that its libraries are found without a path to this machine's copy.
set_target_properties(_C PROPERTIES SKIP_BUILD_RPATH ON INSTALL_RPATH "")

install(TARGETS _C DESTINATION fastcheck)
