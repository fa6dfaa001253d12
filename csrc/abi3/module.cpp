// fastcheck._kernels: the kernels for any Python from 3.9 on, by its stable ABI, and any torch.
//
// Tensors come as pointers, dtype codes, sizes and strides (arguments.h), and stay alive until a
// call has returned; what a call writes to comes as an address.
#include <Python.h>

#include <cstring>

#include "abi3/arguments.h"
#include "abi3/cuda.h"
#include "abi3/new_module.h"
#include "core/exponents.h"
#include "cpu/dispatch.h"
#include "cpu/exponents.h"
#include "kernels/table.h"
#include "kernels/threads.h"

namespace fastcheck::abi3 {
namespace {

using Given = const std::vector<PyObject*>&;

std::int64_t bytes_of(const cpu::TensorView& view) {
  const DTypeInfo& info = kDTypes[static_cast<int>(view.dtype)];
  return view.numel * info.components * info.component_size;
}

// records(tensors, depth, logical, threads, out): a whole record for each tensor, from `out` on.
// How many hold a value that is not finite.
PyObject* records(Given given) {
  const Tensors tensors(given[0]);
  const Depth depth = depth_of(integer(given[1]));
  const bool logical = integer(given[2]) != 0;
  const std::int64_t threads = integer(given[3]);
  auto* out = pointer<Record>(given[4]);
  long nonfinite = 0;
  {
    const WithoutLock without_lock;
    for (const cpu::TensorView& view : tensors.views()) {
      const int useful = useful_threads(bytes_of(view), threads);
      std::memset(out, 0, sizeof(Record));
      cpu::reduce(view, depth, logical, useful, ThreadedFor(useful), *out);
      nonfinite += (out->flags & kFlagNonfinite) != 0;
      ++out;
    }
  }
  return PyLong_FromLong(nonfinite);
}

// checksums(tensors, logical, threads, out): 64 bits for each tensor.
PyObject* checksums(Given given) {
  const Tensors tensors(given[0]);
  const bool logical = integer(given[1]) != 0;
  const std::int64_t threads = integer(given[2]);
  auto* out = pointer<std::uint64_t>(given[3]);
  {
    const WithoutLock without_lock;
    for (const cpu::TensorView& view : tensors.views()) {
      const int useful = useful_threads(bytes_of(view), threads);
      *out++ = cpu::checksum(view, logical, useful, ThreadedFor(useful));
    }
  }
  Py_RETURN_NONE;
}

// exponents(tensors, logical, threads, out): kExponentWords words for each tensor.
PyObject* exponents(Given given) {
  const Tensors tensors(given[0]);
  const bool logical = integer(given[1]) != 0;
  const std::int64_t threads = integer(given[2]);
  auto* words = pointer<std::int64_t>(given[3]);
  {
    const WithoutLock without_lock;
    for (const cpu::TensorView& view : tensors.views()) {
      const int useful = useful_threads(bytes_of(view), threads);
      std::fill_n(words, static_cast<int>(kExponentWords), 0);
      cpu::count_exponents(view, logical, useful, ThreadedFor(useful), words);
      words += kExponentWords;
    }
  }
  Py_RETURN_NONE;
}

// records_and_exponents(tensors, depth, logical, threads, out, words): both, memory read once.
PyObject* records_and_exponents(Given given) {
  const Tensors tensors(given[0]);
  const Depth depth = depth_of(integer(given[1]));
  const bool logical = integer(given[2]) != 0;
  const std::int64_t threads = integer(given[3]);
  auto* out = pointer<Record>(given[4]);
  auto* words = pointer<std::int64_t>(given[5]);
  {
    const WithoutLock without_lock;
    for (const cpu::TensorView& view : tensors.views()) {
      const int useful = useful_threads(bytes_of(view), threads);
      std::memset(out, 0, sizeof(Record));
      std::fill_n(words, static_cast<int>(kExponentWords), 0);
      cpu::reduce_and_count(view, depth, logical, useful, ThreadedFor(useful), *out, words);
      ++out;
      words += kExponentWords;
    }
  }
  Py_RETURN_NONE;
}

PyObject* cpu_isa(Given) { return PyUnicode_FromString(cpu::active_kernels().name); }

PyObject* set_cpu_isa(Given given) {
  const Owned name = owned(PyUnicode_AsUTF8String(given[0]));
  const char* const text = PyBytes_AsString(name.get());
  if (text == nullptr) throw PythonError();
  cpu::set_active_kernels(text);
  Py_RETURN_NONE;
}

// Appends what Py_BuildValue makes.
void append(const Owned& list, PyObject* item) {
  if (PyList_Append(list.get(), owned(item).get()) != 0) throw PythonError();
}

// [(name, whether it is usable, why)], in order of priority.
PyObject* cpu_isas(Given) {
  Owned rows = owned(PyList_New(0));
  for (const cpu::IsaStatus& status : cpu::isa_statuses()) {
    append(rows, Py_BuildValue("(sOs)", status.name, status.usable ? Py_True : Py_False,
                               status.reason.c_str()));
  }
  return rows.release();
}

PyObject* compiler(Given) { return PyUnicode_FromString("g++ " __VERSION__); }

// {field: (offset, size)} of a record.
PyObject* record_layout(Given) {
  Owned layout = owned(PyDict_New());
  const auto add = [&](const char* name, std::size_t offset, std::size_t size) {
    const Owned place = owned(
        Py_BuildValue("(nn)", static_cast<Py_ssize_t>(offset), static_cast<Py_ssize_t>(size)));
    if (PyDict_SetItemString(layout.get(), name, place.get()) != 0) throw PythonError();
  };
#define FASTCHECK_FIELD(field) add(#field, offsetof(Record, field), sizeof(Record::field));
  FASTCHECK_FIELD(numel)
  FASTCHECK_FIELD(nan_count)
  FASTCHECK_FIELD(posinf_count)
  FASTCHECK_FIELD(neginf_count)
  FASTCHECK_FIELD(zero_count)
  FASTCHECK_FIELD(subnormal_count)
  FASTCHECK_FIELD(negative_count)
  FASTCHECK_FIELD(saturated_count)
  FASTCHECK_FIELD(min)
  FASTCHECK_FIELD(max)
  FASTCHECK_FIELD(sum)
  FASTCHECK_FIELD(abs_sum)
  FASTCHECK_FIELD(sum_sq)
  FASTCHECK_FIELD(checksum)
  FASTCHECK_FIELD(seq)
  FASTCHECK_FIELD(step)
  FASTCHECK_FIELD(call)
  FASTCHECK_FIELD(site)
  FASTCHECK_FIELD(flags)
  FASTCHECK_FIELD(version)
  FASTCHECK_FIELD(dtype)
  FASTCHECK_FIELD(order)
  FASTCHECK_FIELD(depth)
  FASTCHECK_FIELD(device_mode)
  FASTCHECK_FIELD(reserved)
#undef FASTCHECK_FIELD
  return layout.release();
}

// [(code, name, components, bytes of a component)].
PyObject* dtype_table(Given) {
  Owned rows = owned(PyList_New(0));
  for (int code = 0; code < kDTypeCount; ++code) {
    const DTypeInfo& info = kDTypes[code];
    append(rows, Py_BuildValue("(isii)", code, info.name, info.components, info.component_size));
  }
  return rows.release();
}

constexpr PyMethodDef kMethods[] = {
    {"records", method<5, records>, METH_VARARGS, nullptr},
    {"checksums", method<4, checksums>, METH_VARARGS, nullptr},
    {"exponents", method<4, exponents>, METH_VARARGS, nullptr},
    {"records_and_exponents", method<6, records_and_exponents>, METH_VARARGS, nullptr},
    {"cpu_isa", method<0, cpu_isa>, METH_VARARGS, nullptr},
    {"set_cpu_isa", method<1, set_cpu_isa>, METH_VARARGS, nullptr},
    {"cpu_isas", method<0, cpu_isas>, METH_VARARGS, nullptr},
    {"compiler", method<0, compiler>, METH_VARARGS, nullptr},
    {"record_layout", method<0, record_layout>, METH_VARARGS, nullptr},
    {"dtype_table", method<0, dtype_table>, METH_VARARGS, nullptr},
};

PyObject* make_module() {
  std::vector<PyMethodDef> methods(std::begin(kMethods), std::end(kMethods));
  methods.insert(methods.end(), kCudaMethods, kCudaMethods + kCudaMethodCount);
  Owned module = owned(
      new_module("_kernels", "fastcheck's kernels; use fastcheck, not this.", std::move(methods)));
  void* const table = const_cast<KernelTable*>(&kernel_table());
  Owned capsule = owned(PyCapsule_New(table, kTableName, nullptr));
  if (PyModule_AddObject(module.get(), "table", capsule.get()) != 0) throw PythonError();
  capsule.release();  // the module's now
  return module.release();
}

}  // namespace
}  // namespace fastcheck::abi3

PyMODINIT_FUNC PyInit__kernels() {
  try {
    return fastcheck::abi3::make_module();
  } catch (const fastcheck::abi3::PythonError&) {
    return nullptr;
  }
}
