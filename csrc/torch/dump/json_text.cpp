#include "torch/dump/json_text.h"

#include <Python.h>

#include <charconv>
#include <cmath>
#include <memory>
#include <new>

namespace fastcheck::dump {

std::string in_quotes(std::string_view name) {
  std::string text;
  text.reserve(name.size() + 2);
  text += '"';
  text += name;
  text += '"';
  return text;
}

void append(std::string& text, std::int64_t number) {
  char digits[24];
  const auto end = std::to_chars(std::begin(digits), std::end(digits), number).ptr;
  text.append(digits, static_cast<std::size_t>(end - digits));
}

void append(std::string& text, double number) {
  if (!std::isfinite(number)) {
    text += std::isnan(number) ? "\"nan\"" : number > 0 ? "\"inf\"" : "\"-inf\"";
    return;
  }
  const std::unique_ptr<char, decltype(&PyMem_Free)> digits(
      PyOS_double_to_string(number, 'r', 0, Py_DTSF_ADD_DOT_0, nullptr), &PyMem_Free);
  if (digits == nullptr) throw std::bad_alloc();
  text += digits.get();
}

}  // namespace fastcheck::dump
