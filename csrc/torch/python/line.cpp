// An op is called with the interpreter's lock let go. The frames of a thread change only while it
// runs Python itself, so in the middle of an op it can read its own without the lock: through the
// fields of CPython's frames where they are known, otherwise through its API and with the lock.
#include "torch/python/line.h"

#include <Python.h>
#include <frameobject.h>
#include <pybind11/pybind11.h>

#include <array>
#include <cstdint>
#include <string_view>
#include <unordered_map>

#if PY_VERSION_HEX < 0x030B0000
#define FASTCHECK_FRAMES 1  // PyFrameObject has them
#elif PY_VERSION_HEX < 0x030E0000 && !defined(Py_GIL_DISABLED)
#define FASTCHECK_FRAMES 2  // _PyInterpreterFrame has them
#undef _PyGC_FINALIZED      // defined twice: github.com/python/cpython/issues/105268
#define Py_BUILD_CORE
#define Py_BUILD_CORE_MODULE
extern "C" {
#include <internal/pycore_frame.h>
}
#undef Py_BUILD_CORE
#undef Py_BUILD_CORE_MODULE
#else
#define FASTCHECK_FRAMES 0
#endif

namespace fastcheck {
namespace {

namespace py = pybind11;

// ---- Frames -------------------------------------------------------------------------------------

#if FASTCHECK_FRAMES == 1

using Frame = PyFrameObject;

Frame* innermost(PyThreadState* state) { return state->frame; }
Frame* outer(Frame* frame) { return frame->f_back; }
PyObject* code_of(Frame* frame) { return reinterpret_cast<PyObject*>(frame->f_code); }
PyObject* globals_of(Frame* frame) { return frame->f_globals; }
// f_lasti counts words from 3.10 on.
int instruction_of(Frame* frame) { return frame->f_lasti * (PY_VERSION_HEX >= 0x030A0000 ? 2 : 1); }
PyObject** variables_of(Frame* frame) { return frame->f_localsplus; }

#elif FASTCHECK_FRAMES == 2

using Frame = _PyInterpreterFrame;

Frame* outer(Frame* frame) { return frame->previous; }
PyObject* globals_of(Frame* frame) { return frame->f_globals; }
#if PY_VERSION_HEX >= 0x030D0000
Frame* innermost(PyThreadState* state) { return state->current_frame; }
PyObject* code_of(Frame* frame) { return frame->f_executable; }
const _Py_CODEUNIT* last_of(Frame* frame) { return frame->instr_ptr; }
#else
Frame* innermost(PyThreadState* state) { return state->cframe->current_frame; }
PyObject* code_of(Frame* frame) {
#if PY_VERSION_HEX >= 0x030C0000
  // Of a call from C, with code that is no program's and nothing else that may be read.
  if (frame->owner == FRAME_OWNED_BY_CSTACK) return nullptr;
#endif
  return reinterpret_cast<PyObject*>(frame->f_code);
}
const _Py_CODEUNIT* last_of(Frame* frame) { return frame->prev_instr; }
#endif
int instruction_of(Frame* frame) {
  auto* const code = reinterpret_cast<PyCodeObject*>(code_of(frame));
  return static_cast<int>(last_of(frame) - _PyCode_CODE(code)) *
         static_cast<int>(sizeof(_Py_CODEUNIT));
}
PyObject** variables_of(Frame* frame) { return frame->localsplus; }

#endif

// ---- Which code is a program's ------------------------------------------------------------------

// The limit for programs that make code without end: what comes later has no lines.
constexpr std::size_t kMaxCodes = 1 << 16;

bool is_of_user(PyObject* globals) {
  PyObject* const name = globals == nullptr ? nullptr : PyDict_GetItemString(globals, "__name__");
  const char* const text =
      name == nullptr || !PyUnicode_Check(name) ? nullptr : PyUnicode_AsUTF8(name);
  if (text == nullptr) PyErr_Clear();
  const std::string_view module = text == nullptr ? "" : text;
  const std::string_view package = module.substr(0, module.find('.'));
  return package != "torch" && package != "fastcheck" && package != "pluggy" &&
         package.substr(0, 7) != "_pytest";
}

std::string_view text_of(PyObject* string) {
  const char* const text = PyUnicode_AsUTF8(string);
  if (text == nullptr) PyErr_Clear();
  return text == nullptr ? "" : text;
}

// The code of a graph that torch.compile has made, and that which it has put in the place of a
// function, with its file and name: no line of these is the program's. The latter calls graphs.
bool is_of_graph(PyObject* object) {
  auto* const code = reinterpret_cast<PyCodeObject*>(object);
  const std::string_view file = text_of(code->co_filename);
  if (file.find("<eval_with_key") != file.npos || file.find("_aot_autograd") != file.npos)
    return true;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(code->co_names); ++i) {
    const std::string_view name = text_of(PyTuple_GET_ITEM(code->co_names, i));
    if (name.substr(0, 13) == "__compiled_fn" || name.substr(0, 11) == "__resume_at") return true;
  }
  return false;
}

// Called with the interpreter's lock. `globals` are looked at when the code is new, which is kept
// then: another one never has its address.
bool is_user_code(PyObject* code, PyObject* globals) {
  static auto* const known = new std::unordered_map<PyObject*, bool>;
  const auto found = known->find(code);
  if (found != known->end()) return found->second;
  if (known->size() >= kMaxCodes) return false;
  Py_INCREF(code);
  return (*known)[code] = is_of_user(globals) && !is_of_graph(code);
}

#if FASTCHECK_FRAMES

struct Recent {
  PyObject* code = nullptr;
  bool is_user = false;
};

bool is_user_frame(Frame* frame, PyObject* code) {
  thread_local std::array<Recent, 256> recent;
  Recent& slot = recent[reinterpret_cast<std::uintptr_t>(code) / 32 % recent.size()];
  if (slot.code != code) {
    const py::gil_scoped_acquire acquire;
    slot = {code, is_user_code(code, globals_of(frame))};
  }
  return slot.is_user;
}

// f_locals would be a dictionary that Python keeps, with all that is in it, until the call is over.
void add_variables(Frame* frame, ProgramFrame& found) {
  auto* const code = reinterpret_cast<PyCodeObject*>(found.code);
  const auto add = [&](PyObject* name, PyObject* value) {
    if (value != nullptr && PyCell_Check(value)) value = PyCell_GET(value);
    if (value != nullptr) found.variables.emplace_back(name, value);
  };
  if ((code->co_flags & CO_OPTIMIZED) == 0) {  // of a script
    PyObject *name = nullptr, *value = nullptr;
    for (Py_ssize_t at = 0; PyDict_Next(found.globals, &at, &name, &value) != 0;) add(name, value);
    return;
  }
  PyObject** next = variables_of(frame);
#if FASTCHECK_FRAMES == 1
  for (PyObject* const names : {code->co_varnames, code->co_cellvars, code->co_freevars}) {
#else
  for (PyObject* const names : {code->co_localsplusnames}) {
#endif
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(names); ++i)
      add(PyTuple_GET_ITEM(names, i), *next++);
  }
}

#endif

}  // namespace

#if FASTCHECK_FRAMES

const void* python_frame() {
  PyThreadState* const state = Py_IsInitialized() ? PyGILState_GetThisThreadState() : nullptr;
  return state == nullptr ? nullptr : innermost(state);
}

PythonLine python_line(const void* within) {
  PyThreadState* const state = Py_IsInitialized() ? PyGILState_GetThisThreadState() : nullptr;
  if (state == nullptr) return {};
  for (Frame* frame = innermost(state); frame != nullptr && frame != within; frame = outer(frame)) {
    PyObject* const code = code_of(frame);
    // Between calls through C there are frames without code.
    if (code == nullptr || !PyCode_Check(code)) continue;
    if (is_user_frame(frame, code)) return {code, instruction_of(frame)};
  }
  return {};
}

std::vector<ProgramFrame> program_frames(std::size_t most) {
  std::vector<ProgramFrame> found;
  Frame* frame = innermost(PyThreadState_Get());
  for (; frame != nullptr && found.size() < most; frame = outer(frame)) {
    PyObject* const code = code_of(frame);
    if (code == nullptr || !PyCode_Check(code) || !is_user_frame(frame, code)) continue;
    found.push_back({code, globals_of(frame), instruction_of(frame), {}});
    add_variables(frame, found.back());
  }
  return found;
}

#else

const void* python_frame() {
  if (!Py_IsInitialized() || PyGILState_GetThisThreadState() == nullptr) return nullptr;
  const py::gil_scoped_acquire acquire;
  PyFrameObject* const frame = PyThreadState_GetFrame(PyThreadState_Get());
  Py_XDECREF(frame);  // its call holds it
  return frame;
}

PythonLine python_line(const void* within) {
  if (!Py_IsInitialized() || PyGILState_GetThisThreadState() == nullptr) return {};
  const py::gil_scoped_acquire acquire;
  PythonLine line;
  PyFrameObject* frame = PyThreadState_GetFrame(PyThreadState_Get());
  while (frame != nullptr && frame != within && !line) {
    PyCodeObject* const code = PyFrame_GetCode(frame);
    PyObject* const globals = PyFrame_GetGlobals(frame);
    if (is_user_code(reinterpret_cast<PyObject*>(code), globals)) {
      line = {code, PyFrame_GetLasti(frame)};
    }
    Py_XDECREF(globals);
    Py_DECREF(code);
    PyFrameObject* const back = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = back;
  }
  Py_XDECREF(frame);
  return line;
}

std::vector<ProgramFrame> program_frames(std::size_t) { return {}; }

#endif

std::string spelt(const PythonLine& line) {
  if (!line || !Py_IsInitialized()) return {};
  const py::gil_scoped_acquire acquire;
  auto* const code = reinterpret_cast<PyCodeObject*>(const_cast<void*>(line.code));
  const int number = PyCode_Addr2Line(code, line.instruction);
  const char* const file = PyUnicode_AsUTF8(code->co_filename);
  const char* const name = PyUnicode_AsUTF8(code->co_name);
  if (file == nullptr || name == nullptr) {
    PyErr_Clear();
    return {};
  }
  return std::string(file) + ":" + std::to_string(number) + " in " + name;
}

}  // namespace fastcheck
