// The current line of a thread's Python code: found without the interpreter's lock, formatted on
// demand.
#pragma once

#include <Python.h>

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

namespace fastcheck {

// A call in a program's source: a code object, which is never let go, and the offset of an
// instruction within it. As cheap to copy as two numbers.
struct PythonLine {
  const void* code = nullptr;  // null: Python is not known to be anywhere
  int instruction = 0;
  explicit operator bool() const { return code != nullptr; }
};

// The innermost frame of this thread; null where it runs no Python. It lives as long as its call.
const void* python_frame();

// The innermost call of this thread that is neither torch's, fastcheck's nor pytest's. With
// `within`, only of those that this frame has led to, as long as its call lasts. The interpreter's
// lock need not be held; it is taken for a function that is met for the first time.
PythonLine python_line(const void* within = nullptr);

// A call of a program, with its local variables: names and values. All are borrowed, and good until
// Python runs again.
struct ProgramFrame {
  PyObject *code, *globals;
  int instruction;
  std::vector<std::pair<PyObject*, PyObject*>> variables;
};

// The innermost calls of this thread that are neither torch's, fastcheck's nor pytest's, at most so
// many; none where CPython's frames are not known. Called with the interpreter's lock.
std::vector<ProgramFrame> program_frames(std::size_t most);

// "train.py:12 in forward"; empty for a line that is none. Takes the interpreter's lock.
std::string spelt(const PythonLine& line);

}  // namespace fastcheck
