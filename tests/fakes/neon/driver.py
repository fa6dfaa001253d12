"""Builds tests/fakes/neon/records.cpp for AArch64, and requests Records from it.

``FASTCHECK_NEON_CXX`` names the compiler, ``FASTCHECK_NEON_RUN`` what runs its programs (an
emulator; nothing on AArch64 itself): ``tests/lab/neon.sh`` finds or fetches both.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import shlex
import shutil
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Optional

import torch

from support.records.reference import DEPTHS, RECORD_BYTES, dtype_of, is_dense
from support.sampling import IS_WHOLE

SOURCE = Path(__file__).resolve().parent
CXX = os.environ.get("FASTCHECK_NEON_CXX", "")
# CMake forgets the target when the compiler of a folder changes: a folder for each.
_KEY = hashlib.sha256(str(shutil.which(CXX) if CXX else "").encode()).hexdigest()[:8]
BUILD = SOURCE.parents[2] / "build" / "neon" / f"records-{_KEY}"
RUN = shlex.split(os.environ.get("FASTCHECK_NEON_RUN", ""))
DIMS = 8
_CASE = struct.Struct(f"<8s8iQ3q{DIMS}q{DIMS}q")
_ANSWER = struct.Struct(f"<{RECORD_BYTES}sQQ")


@dataclasses.dataclass(frozen=True)
class Case:
    """One tensor, and how to read it. ``fpcr`` is the caller's floating-point control register;
    ``alignment`` what the address is modulo 64."""

    x: torch.Tensor
    isa: str = "neon"
    depth: str = "full"
    order: str = "storage"
    threads: int = 1
    alignment: int = 0
    fpcr: int = 0

    def pack(self) -> bytes:
        x = self.x
        storage = bytes(torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage()).numpy().data)
        first = x.storage_offset() * x.element_size()
        sizes, strides = (list(v) + [0] * (DIMS - x.dim()) for v in (x.shape, x.stride()))
        head = _CASE.pack(
            self.isa.encode(),
            dtype_of(x).code,
            DEPTHS[self.depth],
            int(self.order == "logical"),
            self.threads,
            int(is_dense(x)),
            int(x.is_contiguous()),
            self.alignment,
            x.dim(),
            self.fpcr,
            x.numel(),
            first,
            len(storage),
            *sizes,
            *strides,
        )
        return head + storage


@dataclasses.dataclass(frozen=True)
class Answer:
    record: bytes
    fpcr: int  # as it was found afterwards
    flushed: bool  # whether the caller's mode made a zero of a subnormal


def records(cases: Sequence[Case], program: Optional[Path] = None) -> list[Answer]:
    """All of them in one start of the program."""
    done = subprocess.run(
        [*RUN, str(program or build())],
        input=b"".join(case.pack() for case in cases),
        capture_output=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"exit code {done.returncode}: {done.stderr.decode()}")
    answers = [
        Answer(record, fpcr, not product)
        for record, fpcr, product in _ANSWER.iter_unpack(done.stdout)
    ]
    assert len(answers) == len(cases), (len(answers), len(cases))
    return answers


def isas(**env: str) -> subprocess.CompletedProcess[str]:
    """What ``records isas`` prints: a line for each kernel, and the one in use."""
    command = [*RUN, str(build()), "isas"]
    return subprocess.run(
        command, env={**os.environ, **env}, capture_output=True, text=True, check=False
    )


@functools.cache
def build() -> Path:
    """The program, built anew where a source changed."""
    cmake = shutil.which(
        "cmake", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    )
    assert cmake is not None, "cmake is in requirements-build.txt"
    _must(
        [
            cmake,
            *("-S", str(SOURCE), "-B", str(BUILD), "-DCMAKE_BUILD_TYPE=Release"),
            *("-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64"),
            f"-DCMAKE_CXX_COMPILER={CXX}",
            # -O3 is the extension's own, and takes more than four times as long.
            f"-DOPTIMISATION={'-O3' if IS_WHOLE else '-O0'}",
        ]
    )
    _must([cmake, "--build", str(BUILD), "--parallel", "2"])
    return BUILD / "records"


def _must(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout}\n{done.stderr}")
