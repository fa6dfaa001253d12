// Reads the text that nvcc writes: one statement after the other, each up to its semicolon.
#include <cctype>
#include <cstring>
#include <set>
#include <stdexcept>

#include "ptx_on_cpu/program.h"

namespace ptx_on_cpu {
namespace {

constexpr std::uint64_t kGarbage = 0xa5a5'5a5a'a5a5'5a5aull;
// Shared variables begin above a GPU's own part of it, so that an address of 0 is none of them.
constexpr std::uint32_t kFirstShared = 1024;

bool is_letter(char c) { return std::isalpha(static_cast<unsigned char>(c)) != 0 || c == '_'; }

bool is_in_name(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_' || c == '$' || c == '%' ||
         c == '.';
}

std::vector<std::string> tokens_of(const std::string& text) {
  std::vector<std::string> tokens;
  for (std::size_t i = 0; i < text.size();) {
    if (std::isspace(static_cast<unsigned char>(text[i])) != 0) {
      ++i;
    } else if (is_in_name(text[i]) ||
               (text[i] == '-' && i + 1 < text.size() && is_in_name(text[i + 1]))) {
      std::size_t end = i + 1;
      while (end < text.size() && is_in_name(text[end])) ++end;
      tokens.push_back(text.substr(i, end - i));
      i = end;
    } else {
      tokens.push_back(text.substr(i++, 1));
    }
  }
  return tokens;
}

class Parser {
 public:
  Parser(const std::string& name, const std::string& text) : text_(text) { module_.name = name; }

  Module run() {
    while (skip_blanks()) statement();
    for (Function& function : module_.functions) finish(function);
    return std::move(module_);
  }

 private:
  [[noreturn]] void fail(const std::string& what) const {
    throw std::runtime_error(module_.name + ":" + std::to_string(line_) + ": " + what);
  }

  // ---- characters -------------------------------------------------------------------------------

  bool skip_blanks() {
    for (;;) {
      while (at_ < text_.size() && std::isspace(static_cast<unsigned char>(text_[at_])) != 0)
        advance();
      if (text_.compare(at_, 2, "//") != 0) return at_ < text_.size();
      while (at_ < text_.size() && text_[at_] != '\n') advance();
    }
  }

  void advance() { line_ += text_[at_++] == '\n' ? 1 : 0; }

  // The text up to one of `ends`, without comments, and past that character.
  std::string until(const char* ends) {
    std::string out;
    while (at_ < text_.size() && std::strchr(ends, text_[at_]) == nullptr) {
      if (text_.compare(at_, 2, "//") == 0) {
        while (at_ < text_.size() && text_[at_] != '\n') advance();
      } else {
        out += text_[at_];
        advance();
      }
    }
    if (at_ < text_.size()) {
      end_ = text_[at_];
      advance();
    }
    return out;
  }

  // ---- statements -------------------------------------------------------------------------------

  void statement() {
    if (text_[at_] == '{' || text_[at_] == '}') {
      scope_ += text_[at_] == '{' ? 1 : -1;
      if (scope_ == 0) function_ = nullptr;
      return advance();
    }
    std::size_t end = at_;
    while (end < text_.size() && is_in_name(text_[end])) ++end;
    const std::string word = text_.substr(at_, end - at_);
    if (word == ".extern") {
      at_ = end;
      return;  // what it stands before says the rest
    }
    if (word == ".version" || word == ".target" || word == ".address_size") {
      until("\n");
    } else if (word == ".visible" || word == ".func" || word == ".entry" || word == ".weak") {
      header();
    } else if (end < text_.size() && text_[end] == ':') {
      at_ = end + 1;
      labels_[{module_.functions.size() - 1, word}] = static_cast<int>(function_->code.size());
    } else if (word == ".shared" || word == ".global") {
      variable(word == ".shared");
    } else if (word == ".reg") {
      // %r<768> are known by their use; an inline assembly's own may have any name.
      for (const std::string& name : tokens_of(until(";"))) {
        if (is_letter(name[0])) registers_.insert(name);
      }
    } else if (word[0] == '.') {
      until(";");  // .param within a function, .pragma
    } else {
      instruction();
    }
  }

  void header() {
    const std::string start = until("(");
    const std::vector<std::string> words = tokens_of(start);
    const bool is_kernel = start.find(".entry") != std::string::npos;
    if (words.back() == ".func") fail("a function that returns something");
    Function function;
    function.name = words.back();
    const std::vector<std::string> inside = tokens_of(until(")"));
    std::vector<std::string> names;
    for (std::size_t i = 0; i < inside.size(); ++i) {
      if (inside[i] == "[") function.argument_bytes = std::stoul(inside[i + 1]);
      const bool is_last = i + 1 == inside.size() || inside[i + 1] == "," || inside[i + 1] == "[";
      if (is_last && is_letter(inside[i][0])) names.push_back(inside[i]);
    }
    function.parameters = static_cast<int>(names.size());
    if (is_kernel && names.size() != 1) fail("a kernel of other than one argument");
    until("{;");
    if (end_ == ';') return;  // a declaration
    scope_ = 1;
    module_.function_by_name[function.name] = static_cast<int>(module_.functions.size());
    module_.functions.push_back(std::move(function));
    function_ = &module_.functions.back();
    places_.clear();
    for (std::size_t i = 0; i < names.size(); ++i) {
      symbols_[names[i]] = is_kernel ? kArguments : kIncoming | i * kParameterBytes;
    }
  }

  void variable(bool is_shared) {
    const std::vector<std::string> words = tokens_of(until(";"));
    std::size_t name = 0;
    std::uint32_t align = 1;
    for (std::size_t i = 0; i + 1 < words.size(); ++i) {
      if (words[i] == ".align") align = static_cast<std::uint32_t>(std::stoul(words[i + 1]));
      if (words[i + 1] == "[") name = i;
    }
    if (name == 0) fail("a variable that is no array");
    const bool is_of_launch = is_shared && words[name + 2] == "]";
    const auto bytes = is_of_launch ? 0 : static_cast<std::uint32_t>(std::stoul(words[name + 2]));
    if (is_shared) {
      // A gap behind each, where nothing may be read or written.
      const std::uint32_t before =
          module_.shared.empty() ? kFirstShared : module_.shared.back().end + 256;
      const std::uint32_t begin = (before + align - 1) / align * align;
      module_.shared.push_back({words[name], begin, begin + bytes, is_of_launch});
      symbols_[words[name]] = begin;
      return;
    }
    std::vector<unsigned char>& data = module_.globals[words[name]];
    data.assign(bytes, 0);
    std::size_t i = 0;
    for (std::size_t w = name + 4; w < words.size(); ++w) {
      if (std::isdigit(static_cast<unsigned char>(words[w][0])) != 0) {
        data.at(i++) = static_cast<unsigned char>(std::stoul(words[w]));
      }
    }
    symbols_[words[name]] = reinterpret_cast<std::uintptr_t>(data.data());
  }

  void instruction() {
    Instruction made;
    made.line = line_;
    std::vector<std::string> words = tokens_of(until(";"));
    std::size_t w = 0;
    if (words[0] == "@") {
      made.guard_is_negated = words[1] == "!";
      w = made.guard_is_negated ? 2 : 1;
      made.guard = place(words[w++]);
    }
    made.name = words[w++];
    if (made.name == "bra" || made.name == "bra.uni") {
      made.name = "bra";
      branches_.push_back({module_.functions.size() - 1, function_->code.size(), words[w]});
    } else if (made.name == "call.uni") {
      if (words[w] == "(") fail("a call that returns something");
      calls_.push_back({module_.functions.size() - 1, function_->code.size(), words[w++]});
      for (int i = 0; w < words.size(); ++w) {
        if (words[w].rfind("param", 0) != 0) continue;
        if (words[w] != "param" + std::to_string(i++)) fail("arguments in another order");
      }
    } else {
      operands(words, w, made);
    }
    function_->code.push_back(std::move(made));
  }

  void operands(const std::vector<std::string>& words, std::size_t w, Instruction& made) {
    bool is_address = false;
    for (int nth = 0; w < words.size(); ++w) {
      const std::string& word = words[w];
      if (word == ",") {
        ++nth;
      } else if (word == "{" && (made.name == "mov.b64" || made.name == "mov.b32")) {
        made.name += nth == 0 ? ".unpack" : ".pack";
      } else if (word == "[") {
        is_address = true;
      } else if (word == "+" && is_address) {
        made.offset = static_cast<std::int64_t>(number(words[++w]));
      } else if (is_address && word[0] == '-') {
        made.offset = static_cast<std::int64_t>(number(word));
      } else if (is_in_name(word[0]) || word[0] == '-') {
        if (made.operands == static_cast<int>(made.operand.size())) fail("too many operands");
        made.operand[made.operands++] = place(word);
      } else if (word == "]") {
        is_address = false;
      }
    }
  }

  // ---- operands ---------------------------------------------------------------------------------

  static bool is_number(const std::string& word) {
    return std::isdigit(static_cast<unsigned char>(word[word[0] == '-' ? 1 : 0])) != 0;
  }

  std::uint64_t number(const std::string& word) const {
    if (word.rfind("0f", 0) == 0 || word.rfind("0d", 0) == 0)
      return std::stoull(word.substr(2), nullptr, 16);
    if (!is_number(word)) fail("'" + word + "' is no number");
    if (word[0] == '-') return 0 - std::stoull(word.substr(1), nullptr, 0);
    return std::stoull(word, nullptr, 0);
  }

  int place(const std::string& word) {
    const auto known = places_.find(word);
    if (known != places_.end()) return known->second;
    const int index = static_cast<int>(function_->frame.size());
    places_[word] = index;
    std::uint64_t value = kGarbage;
    if (word == "%tid.x") {
      function_->tid = index;
    } else if (word == "%ntid.x") {
      function_->ntid = index;
    } else if (word == "%ctaid.x") {
      function_->ctaid = index;
    } else if (word == "%nctaid.x") {
      function_->nctaid = index;
    } else if (word[0] == '%' || registers_.count(word) != 0) {
      // a register
    } else if (is_number(word)) {
      value = number(word);
    } else if (word.rfind("param", 0) == 0) {
      value = kOutgoing | std::stoul(word.substr(5)) * kParameterBytes;
    } else if (const auto symbol = symbols_.find(word); symbol != symbols_.end()) {
      value = symbol->second;
      note_shared(word);
    } else {
      fail("'" + word + "' is not known");
    }
    function_->frame.push_back(value);
    return index;
  }

  void note_shared(const std::string& name) {
    for (std::size_t i = 0; i < module_.shared.size(); ++i) {
      if (module_.shared[i].name != name) continue;
      if (function_->shared >= 0) fail("a function of two shared variables");
      function_->shared = static_cast<int>(i);
    }
  }

  // ---- what can only be said at the end ---------------------------------------------------------

  void finish(Function& function) {
    const auto index = static_cast<std::size_t>(&function - module_.functions.data());
    for (const Reference& branch : branches_) {
      if (branch.function != index) continue;
      const auto found = labels_.find({branch.function, branch.name});
      if (found == labels_.end()) fail("a branch to nowhere, " + branch.name);
      function.code[branch.instruction].target = found->second;
    }
    for (const Reference& call : calls_) {
      if (call.function != index) continue;
      const auto found = module_.function_by_name.find(call.name);
      if (found == module_.function_by_name.end()) fail("a call of nothing, " + call.name);
      function.code[call.instruction].target = found->second;
    }
    for (Instruction& instruction : function.code) {
      const auto found = definitions().find(instruction.name);
      line_ = instruction.line;
      if (found == definitions().end()) fail("no definition of " + instruction.name);
      if (found->second.operands != instruction.operands) {
        fail(instruction.name + " has " + std::to_string(instruction.operands) + " operands");
      }
      instruction.execute = found->second.execute;
    }
  }

  struct Reference {
    std::size_t function, instruction;
    std::string name;
  };

  const std::string& text_;
  std::size_t at_ = 0;
  int line_ = 1;
  char end_ = 0;
  int scope_ = 0;
  Module module_;
  Function* function_ = nullptr;
  std::map<std::string, std::uint64_t> symbols_;
  std::set<std::string> registers_;
  std::map<std::string, int> places_;  // of the function
  std::map<std::pair<std::size_t, std::string>, int> labels_;
  std::vector<Reference> branches_, calls_;
};

}  // namespace

Module parse(const std::string& name, const std::string& text) { return Parser(name, text).run(); }

}  // namespace ptx_on_cpu
