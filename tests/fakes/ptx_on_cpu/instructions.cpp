#include "ptx_on_cpu/table.h"

namespace ptx_on_cpu {

const std::map<std::string, Definition>& definitions() {
  static const std::map<std::string, Definition> all = [] {
    Table table;
    define_integers(table);
    define_floats(table);
    define_moves(table);
    define_accesses(table);
    define_meetings(table);
    return table.take();
  }();
  return all;
}

}  // namespace ptx_on_cpu
