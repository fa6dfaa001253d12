"""Compiles the device's C++ into build/fake_device, once per content of the sources and torch.

`python tests/fakes/fake_device/build.py` builds and prints the path. Standard library and torch
only."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.machinery
import os
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import torch

SOURCE = Path(__file__).resolve().parent / "csrc"
BUILD = Path(__file__).resolve().parents[3] / "build" / "fake_device"
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
    flags = ["-std=c++20", "-O1", "-g1", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra"]
    flags += [f"-I{SOURCE}", f"-isystem{root}", f"-isystem{root / 'torch/csrc/api/include'}"]
    flags += [f"-isystem{sysconfig.get_paths()['include']}"]
    flags += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    if _version() >= (2, 12):
        flags.append("-DFAKE_HAS_NATIVE_HANDLE")
    return flags


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(list(command), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"building the fake device failed:\n{' '.join(command)}\n{done.stderr}")
    if done.stderr:
        sys.stderr.write(done.stderr)


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def build() -> Path:
    """The path of the compiled module; compiles what has changed, one file at a time.

    Needs a C++20 compiler ($CXX, else g++). RuntimeError with the compiler's output when it fails.
    """
    compiler = os.environ.get("CXX", "g++")
    flags = compile_flags()
    base = _digest(torch.__version__, compiler, sys.version, *flags)
    headers = "\0".join(p.read_text() for p in sorted(SOURCE.glob("*.h")))
    units = {
        unit: BUILD / f"{unit}-{_digest(base, headers, (SOURCE / f'{unit}.cpp').read_text())}.o"
        for unit in UNITS
    }
    suffix = importlib.machinery.EXTENSION_SUFFIXES[0]
    target = BUILD / _digest(*(str(path) for path in units.values())) / f"{NAME}{suffix}"
    if target.exists():
        return target
    BUILD.mkdir(parents=True, exist_ok=True)
    with open(BUILD / "lock", "w") as lock:  # several test processes may start at once
        fcntl.flock(lock, fcntl.LOCK_EX)
        for unit, path in units.items():
            if not path.exists():
                part = path.with_suffix(".part")
                _run([compiler, *flags, "-c", str(SOURCE / f"{unit}.cpp"), "-o", str(part)])
                part.rename(path)
        target.parent.mkdir(exist_ok=True)
        libraries = Path(torch.__file__).parent / "lib"
        part = target.with_suffix(".part")
        link = ["-shared", "-o", str(part), *map(str, units.values()), f"-L{libraries}"]
        link += [f"-Wl,-rpath,{libraries}", "-ltorch", "-ltorch_cpu", "-lc10", "-pthread"]
        _run([compiler, *link])
        part.rename(target)
    return target


if __name__ == "__main__":
    print(build())
