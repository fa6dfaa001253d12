// JSON text, formatted as Python's json.dumps does.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace fastcheck::dump {

// ASCII without quotes and backslashes: names of operators and of their arguments.
std::string in_quotes(std::string_view name);

void append(std::string& text, std::int64_t number);
// Where JSON has no such number: "nan", "inf" or "-inf", as fastcheck.utils.text.numbers.to_json
// has it.
void append(std::string& text, double number);

// "[", the items with commas between them, "]".
template <class Items, class Append>
void append_list(std::string& text, const Items& items, const Append& append_item) {
  text += '[';
  bool is_first = true;
  for (const auto& item : items) {
    if (!is_first) text += ", ";
    is_first = false;
    append_item(text, item);
  }
  text += ']';
}

}  // namespace fastcheck::dump
