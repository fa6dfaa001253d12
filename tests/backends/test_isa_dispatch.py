"""The choice of the CPU kernels on a machine that lacks an instruction set, without such a machine.

``dispatch.cpp`` is linked with a detection that finds nothing, and with tables of kernels that end
the process when they are asked for, as an instruction that the CPU does not have would.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from support.paths import ROOT

COMPILER = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")

PROGRAM = """
#include <cstdio>
#include <cstdlib>
#include "cpu/cpu_features.h"
#include "cpu/dispatch.h"

namespace fastcheck::cpu {
CpuFeatures detect_cpu_features() { return {}; }
const KernelSet* avx2_kernels() { std::abort(); }
const KernelSet* avx512_kernels() { std::abort(); }
const KernelSet* avx512_vnni_kernels() { std::abort(); }
const KernelSet* avx512_vbmi_kernels() { std::abort(); }
const KernelSet* neon_kernels() { std::abort(); }
const KernelSet* scalar_kernels() {
  static KernelSet set{"scalar"};
  return &set;
}
}  // namespace fastcheck::cpu

int main() {
  for (const auto& status : fastcheck::cpu::isa_statuses()) {
    std::printf("%s %d ", status.name, status.usable);
  }
  std::printf("%s", fastcheck::cpu::active_kernels().name);
}
"""


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_a_table_of_kernels_is_not_asked_for_where_the_cpu_lacks_its_instructions(
    tmp_path: Path,
) -> None:
    (tmp_path / "main.cpp").write_text(PROGRAM)
    sources = [tmp_path / "main.cpp", ROOT / "csrc/cpu/dispatch.cpp"]
    command = [*COMPILER.split(), "-std=c++17", f"-I{ROOT / 'csrc'}", *sources]
    subprocess.run([*command, "-o", tmp_path / "program"], check=True)
    environment = {name: value for name, value in os.environ.items() if name != "FASTCHECK_CPU_ISA"}
    done = subprocess.run(
        [tmp_path / "program"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, "a table was asked for"
    x86 = ["avx512_vbmi", "avx512_vnni", "avx512", "avx2"]
    names = x86 if platform.machine() == "x86_64" else ["neon"]
    assert done.stdout == "".join(f"{name} 0 " for name in names) + "scalar 1 scalar"
