"""Compiles the device into build/fake_device, once per content of sources, compiler and torch.

`python tests/fakes/fake_device/build.py` builds and prints the path. Standard library and torch
only."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.machinery
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import torch

SOURCE = Path(__file__).resolve().parent / "csrc"
ROOT = Path(__file__).resolve().parents[3]
BUILD = Path(os.environ.get("FASTCHECK_TEST_BUILD") or ROOT / "build") / "fake_device"
NAME = "fake_device_C"
UNITS = (
    *("counters", "streams", "memory", "module", "registration", "launch", "ops", "autocast"),
    *("graphs", "graph_impl", "c_interface"),
)


def _version() -> tuple[int, int]:
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def compile_flags() -> list[str]:
    """What every source file is compiled with."""
    root = Path(torch.__file__).parent / "include"
    # torch's headers need C++20 from 2.14 on; with C++17 they take a fifth less.
    standard = "-std=c++20" if _version() >= (2, 14) else "-std=c++17"
    flags = [standard, "-O1", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra"]
    flags += [f"-I{SOURCE}", f"-isystem{root}", f"-isystem{root / 'torch/csrc/api/include'}"]
    flags += [f"-isystem{sysconfig.get_paths()['include']}"]
    flags += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    if _version() >= (2, 12):
        flags.append("-DFAKE_HAS_NATIVE_HANDLE")
    return flags


def _autocast_lists() -> str:
    """The macros of ATen/autocast_mode.h that name the operators of each precision."""
    header = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
    lists = r"^#define AT_FORALL_\w+\(_\).*\\\n(?:.*\\\n)*.*\n"
    return "".join(re.findall(lists, header.read_text(), re.MULTILINE))


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(list(command), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"building the fake device failed:\n{' '.join(command)}\n{done.stderr}")
    if done.stderr:
        sys.stderr.write(done.stderr)
    return done.stdout


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def build() -> Path:
    """The path of the compiled module, compiled unless it is there: all sources as one file, since
    most of the time goes into torch's headers.

    Needs a compiler ($CXX, else g++) of C++17, and of C++20 from torch 2.14 on. RuntimeError with
    the compiler's output when it fails.
    """
    compiler = os.environ.get("CXX", "g++")
    # torch's headers then declare the operators that they use in place of all.
    flags = [*compile_flags(), "-DAT_PER_OPERATOR_HEADERS"]
    texts = [path.read_text() for path in sorted(SOURCE.iterdir())]
    versions = (torch.__version__, sys.version, _run([compiler, "--version"]))
    digest = _digest(compiler, *versions, *flags, *UNITS, *texts)
    target = BUILD / digest / f"{NAME}{importlib.machinery.EXTENSION_SUFFIXES[0]}"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(BUILD / "lock", "w") as lock:  # several test processes may start at once
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            target.with_name("autocast_lists.h").write_text(_autocast_lists())
            whole = target.with_name("whole.cpp")
            whole.write_text("".join(f'#include "{unit}.cpp"\n' for unit in UNITS))
            libraries = Path(torch.__file__).parent / "lib"
            part = target.with_suffix(".part")
            link = ["-shared", "-o", str(part), str(whole), f"-L{libraries}"]
            link += [f"-Wl,-rpath,{libraries}", "-ltorch", "-ltorch_cpu", "-lc10", "-pthread"]
            _run([compiler, *flags, f"-I{target.parent}", *link])
            part.rename(target)
    return target


if __name__ == "__main__":
    print(build())
