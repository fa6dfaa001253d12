"""Lowers the Triton kernels for an Ascend 910B and looks at what comes out (tests/lab/npu_lab.sh
runs it, in an environment with triton-ascend).

What is read in vectors has to stay so: two loops, over steps and over the rows of a step, and no
load of single elements but of the up to three components behind the last whole word, and of a
list's table. Then
bishengir-compile has to find room for it in the unified buffer. It ends by calling ``hivmc``, which
is CANN's and not here: a stand-in notes that it was called. With ``--mlir`` the Linalg is compiled
for the CPU, and has to give the records of the reference (npu_lab_run.py).

python tests/lab/npu_lab.py BISHENGIR_COMPILE [--mlir FOLDER] [--dtypes float32 ...]
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend

from fastcheck.backends.portable.formats import FORMATS
from fastcheck.backends.triton import launch
from lab.npu_lab_run import records_that_differ
from support.devices.triton_sources import KERNELS, source

CHIP = "Ascend910B1"
torch.utils.rename_privateuse1_backend("npu")  # as torch_npu does
NPU = launch.target_of(torch.device("npu"))
#: Of a list, what a program reads of the table: which tensor, where it is, and its shape.
TABLE_LOADS = {"part_list": 8, "fold_list": 7}
OPTIONS = (
    "--enable-auto-multi-buffer=true",
    "--enable-auto-bind-sub-block=true",
    "--enable-hfusion-compile=true",
    "--enable-hivm-compile=true",
    "--enable-triton-kernel-compile=true",
)
HIVMC = """#!/bin/sh
case "$*" in *--version*) echo "hivmc 1.2.0 (a stand-in)"; exit 0;; esac
touch "$HIVMC_CALLED"
exit 1
"""


def lowered(kernel: Any, types: dict[str, str], constants: dict[str, int]) -> str:
    """The Linalg that triton-ascend makes, its stage "ttadapter"."""
    target = GPUTarget("npu", CHIP, 0)
    backend = make_backend(target)
    options = backend.parse_options({})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options)
    code = ASTSource(fn=kernel, signature=types, constants=constants)
    implementation, modules = backend.get_codegen_implementation(), backend.get_module_map()
    module = code.make_ir(options, implementation, modules, context)
    for stage in ("ttir", "ttadapter"):
        module = stages[stage](module, {"target": target, **options.__dict__})
    return str(module)


def problems(name: str, dtype: str, linalg: str) -> list[str]:
    found = []
    size = FORMATS[getattr(torch, dtype)].info.component_bytes
    reads = not name.startswith("fold")
    if reads:  # a fold has a loop for each of its columns, over as many rows as there are programs
        loops = len(re.findall(r"\bscf\.for\b", linalg))
        if loops != 2:
            found.append(f"{loops} loops, expected 2: of steps and rows")
    scalars = len(re.findall(r"\bmemref\.load\b", linalg))
    most = (4 // size - 1 if size < 4 and reads else 0) + TABLE_LOADS.get(name, 0)
    if scalars > most:
        found.append(f"{scalars} loads of single elements, expected {most} at most")
    for what in (r"\bf64\b", r"tensor<[0-9x]*xi64>", "atomic", "sync_block_lock"):
        if re.search(what, linalg):
            found.append(f"{what} in it")
    return found


def compile_problem(compiler: str, linalg: str, folder: Path) -> str:
    """Why bishengir-compile doesn't get to the closed compiler; empty when it does."""
    (folder / "kernel.mlir").write_text(linalg)
    (folder / "hivmc").write_text(HIVMC)
    (folder / "hivmc").chmod(0o755)
    called = folder / "called"
    called.unlink(missing_ok=True)
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    command = [compiler, f"--target={CHIP}", *OPTIONS, "kernel.mlir", "-o", "kernel.bin"]
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PATH": path, "HIVMC_CALLED": str(called)},
        capture_output=True,
        text=True,
        check=False,
    )
    if called.exists():
        return ""
    lines = (done.stdout + done.stderr).splitlines()
    said = [line for line in lines if "rror" in line or "overflow" in line]
    return said[0] if said else f"exit status {done.returncode}, hivmc not called"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("compiler", help="bishengir-compile of the package ascendnpu-ir")
    parser.add_argument("--dtypes", nargs="+")
    parser.add_argument("--mlir", type=Path, help="folder of mlir-opt, mlir-translate and clang")
    options = parser.parse_args()
    names = [str(dtype)[6:] for dtype in FORMATS if launch.reads(dtype)]
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        for dtype in options.dtypes or names:
            for name in KERNELS:
                kernel, types, constants, _ = source(name, dtype, NPU)
                linalg = lowered(kernel, types, constants)
                found = problems(name, dtype, linalg)
                stopped = compile_problem(options.compiler, linalg, Path(folder))
                found += [stopped] if stopped else []
                print(f"{dtype:9} {name:6} {'; '.join(found) or 'ok'}", flush=True)
                failed += bool(found)
        for dtype in (options.dtypes or names) if options.mlir else ():
            found = records_that_differ(dtype, lowered, options.mlir, Path(folder))
            print(f"{dtype:9} run    {'; '.join(found) or 'ok'}", flush=True)
            failed += bool(found)
    print(f"{failed} failures for {CHIP}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
