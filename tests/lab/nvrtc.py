#!/usr/bin/env python3
"""An nvcc of CUDA 12 for csrc/cuda: NVRTC and ptxas of its PyPI packages, in nvcc's place.

CUDA 12's nvcc is on no package index, but the compiler inside it is, as NVRTC. It compiles kernels
alone: of a source in csrc/cuda it is given the kernels that the source instantiates, without the
host code around them. Understands what tests/fakes passes to nvcc, and nothing else:

    nvrtc.py --version
    nvrtc.py ... -arch=compute_70 -ptx SOURCE -o TARGET
    nvrtc.py ... -arch=sm_70 -Xptxas=-v -cubin PTX -o TARGET

FASTCHECK_CUDA12 is the folder that the packages were installed into (cuda12.sh).
"""

from __future__ import annotations

import collections
import ctypes
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

CSRC = Path(__file__).resolve().parents[2] / "csrc"
HOME = Path(os.environ["FASTCHECK_CUDA12"]) / "nvidia"
INCLUDES = (HOME / "cuda_cccl" / "include", HOME / "cuda_runtime" / "include")

#: NVRTC has no C++ library; CUDA's own stands for what the kernels use of it. Layouts, which it
#: can't be asked for, are those of the host's compiler: offsets().
PROLOGUE = """\
#include <cuda/std/cstddef>
#include <cuda/std/cstdint>
#include <cuda/std/type_traits>
#include <cuda/std/utility>
namespace std {
using namespace cuda::std;
using int64_t = long;  // of the host's compiler, whose names for kernels these are
using uint64_t = unsigned long;
using uintptr_t = unsigned long;
}
#undef offsetof
#define offsetof(type, member) offset_of_##type##_##member
#define static_assert(...)
"""
NOTHING = "#pragma once\n"
HEADERS = {
    **dict.fromkeys(("cmath", "cstddef", "cstdint", "cstring", "type_traits", "utility"), NOTHING),
    "algorithm": NOTHING
    + """namespace std {
template <class T> constexpr T min(T a, T b) { return b < a ? b : a; }
template <class T> constexpr T max(T a, T b) { return a < b ? b : a; }
}
""",
}


def instantiations(source: str, text: str) -> tuple[list[str], list[str]]:
    """The headers of a source's kernels, and the kernels."""

    def components(macro: str) -> list[str]:
        return re.findall(rf"^{macro}\((.+)\)$", text, re.MULTILINE)

    kernels = [
        f"records_kernel<{component}, Depth::{depth}>(FASTCHECK_ARGUMENT RecordsLaunch<{tensors}>)"
        for macro, tensors in (("RECORDS", "List"), ("RECORDS_OF_ONE", "OneTensor"))
        for component in components(f"FASTCHECK_START_{macro}")
        for depth in ("kHealth", "kStats", "kFull")
    ]
    if kernels:
        return ["cuda/records.cuh"], kernels
    kernels = [
        f"found_nonfinite_kernel<{format}>(FASTCHECK_ARGUMENT FoundLaunch)"
        for format in components("FASTCHECK_START_FOUND")
    ]
    if kernels:
        return ["cuda/found_nonfinite.cuh"], kernels
    kernels = [
        f"exponents_kernel<{format}>(FASTCHECK_ARGUMENT ExponentsLaunch)"
        for format in components("FASTCHECK_START_EXPONENTS")
    ]
    if kernels:
        return ["cuda/exponents.cuh"], kernels
    kernels = [
        f"record_and_exponents_kernel<{format}>(FASTCHECK_ARGUMENT RecordAndExponentsLaunch)"
        for format in components("FASTCHECK_START_BOTH")
    ]
    if kernels:
        return ["cuda/record_and_exponents.cuh"], kernels
    return [], []


def offsets() -> str:
    """The macros that PROLOGUE's offsetof() names for the members of core's structures."""
    headers = "".join(path.read_text() for path in sorted(CSRC.glob("core/*.h")))
    members = sorted(set(re.findall(r"\boffsetof\((\w+), (\w+)\)", headers)))
    lines = ["#include <cstdio>", '#include "core/accumulator.h"', "int main() {"]
    for of, member in members:
        place = f"offsetof(fastcheck::{of}, {member})"
        lines.append(f'  std::printf("#define offset_of_{of}_{member} %zu\\n", {place});')
    compiler = [os.environ.get("CXX", "g++"), "-std=c++17", f"-I{CSRC}", "-x", "c++", "-"]
    with tempfile.TemporaryDirectory() as folder:
        printer = f"{folder}/printer"
        text = "\n".join([*lines, "}", ""])
        subprocess.run([*compiler, "-o", printer], input=text, text=True, check=True)
        return subprocess.run([printer], capture_output=True, text=True, check=True).stdout


def program(source: Path) -> str:
    headers, kernels = instantiations(source.stem, source.read_text())
    lines = [f'#include "{header}"' for header in headers]
    lines += ["namespace fastcheck::cuda {"]
    lines += [f"template __global__ void {kernel};" for kernel in kernels]
    return PROLOGUE + offsets() + "\n".join([*lines, "}", ""])


def ptx(source: Path, arch: str, options: list[str]) -> bytes:
    library = ctypes.CDLL(str(next((HOME / "cuda_nvrtc" / "lib").glob("libnvrtc.so.12"))))

    def text(kind: str) -> bytes:
        size = ctypes.c_size_t()
        library[f"nvrtcGet{kind}Size"](handle, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        library[f"nvrtcGet{kind}"](handle, buffer)
        return buffer.value

    handle = ctypes.c_void_p()
    with tempfile.TemporaryDirectory() as headers:
        for header, its_text in HEADERS.items():
            (Path(headers) / header).write_text(its_text)
        flags = [f"-arch={arch}", "-default-device", *options]
        flags += [f"-I{path}" for path in (headers, *INCLUDES)]
        encoded = [flag.encode() for flag in flags]
        code = program(source).encode()
        library.nvrtcCreateProgram(ctypes.byref(handle), code, str(source).encode(), 0, None, None)
        status = library.nvrtcCompileProgram(
            handle, len(encoded), (ctypes.c_char_p * len(encoded))(*encoded)
        )
    if status != 0:
        raise SystemExit(text("ProgramLog").decode())
    return without_constants(text("PTX").decode()).encode()


def without_constants(code: str) -> str:
    """Without the variables that NVRTC makes of static constants, whose values are in the code."""
    variable = re.compile(r"^\.global \.align \d+ \.\w+ (\w+)(?: = \S+)?;\n", re.MULTILINE)
    used = collections.Counter(re.findall(r"\b_Z\w+", code))
    return variable.sub(lambda found: "" if used[found[1]] == 1 else found[0], code)


def main(arguments: list[str]) -> int:
    ptxas = str(HOME / "cuda_nvcc" / "bin" / "ptxas")
    if arguments == ["--version"]:
        return subprocess.run([ptxas, "--version"], check=False).returncode
    target = Path(arguments[arguments.index("-o") + 1])
    arch = next(a.partition("=")[2] for a in arguments if a.startswith("-arch="))
    if "-ptx" in arguments:
        source = Path(arguments[arguments.index("-ptx") + 1])
        options = [a for a in arguments if re.match(r"-I|-std=|-fmad=", a)]
        target.write_bytes(ptx(source, arch, options))
        return 0
    source = Path(arguments[arguments.index("-cubin") + 1])
    command = [ptxas, f"-arch={arch}", "-v", str(source), "-o", str(target)]
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
