// A PTX module as nvcc writes it, taken apart: functions, their instructions, the module's
// variables.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace ptx_on_cpu {

struct Thread;
struct Instruction;

using Execute = void (*)(Thread&, const Instruction&);

// Addresses that are not the host's carry one of these marks above 48 bits.
constexpr std::uint64_t kMarks = 0xffffull << 48;
constexpr std::uint64_t kArguments = 1ull << 48;  // of the launch
constexpr std::uint64_t kIncoming = 2ull << 48;   // of the function that runs
constexpr std::uint64_t kOutgoing = 3ull << 48;   // of the function that it is about to call
constexpr std::uint64_t kShared = 4ull << 48;  // as a generic address; ld.shared takes it without
constexpr int kParameterBytes = 8;             // of a function that is no kernel: each its own word

// Operands are places in a frame: each register and each constant has one.
struct Instruction {
  Execute execute = nullptr;
  std::string name;  // with all its modifiers
  int line = 0;
  int guard = -1;  // a predicate, or -1
  bool guard_is_negated = false;
  std::array<int, 8> operand{};  // what stood in braces, or on either side of a bar, one by one
  int operands = 0;
  std::int64_t offset = 0;  // of the address
  int target = -1;          // of a branch: an index into the code; of a call: a function
};

struct Function {
  std::string name;
  std::size_t argument_bytes = 0;  // of a kernel
  int parameters = 0;
  std::vector<Instruction> code;
  std::vector<std::uint64_t> frame;  // as a thread finds it: garbage, then the constants
  int shared = -1;                   // the module's variable that it names
  // Where the frame holds %tid.x and the like; -1 where the function does not read it.
  int tid = -1, ntid = -1, ctaid = -1, nctaid = -1;
};

struct SharedVariable {
  std::string name;
  std::uint32_t begin = 0, end = 0;
  bool is_of_launch = false;  // which says how large it is
};

struct Module {
  std::string name;
  std::vector<Function> functions;
  std::map<std::string, int> function_by_name;
  std::vector<SharedVariable> shared;
  std::map<std::string, std::vector<unsigned char>> globals;  // with an initialiser, only read
};

// Throws std::runtime_error with the line that it does not understand.
Module parse(const std::string& name, const std::string& text);

// What an instruction does, by its name; `operands` is how many it must have (instructions.cpp).
struct Definition {
  Execute execute;
  int operands;
};
const std::map<std::string, Definition>& definitions();

}  // namespace ptx_on_cpu
