"""The fastest pure read of memory on this machine: pure_read.cpp through ctypes."""

from __future__ import annotations

import ctypes
import hashlib
import os
import statistics
import subprocess
import time
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("pure_read.cpp")


def cache_dir() -> Path:
    """The directory where benches keep what they build or install, outside the repository."""
    base = os.environ.get("FASTCHECK_BENCH_CACHE")
    if base is None:
        base = os.path.join(
            os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "fastcheck-bench"
        )
    path = Path(base)
    path.mkdir(parents=True, exist_ok=True)
    return path


def _compile() -> ctypes.CDLL:
    compiler = os.environ.get("CXX", "g++")
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    library = cache_dir() / f"pure_read-{digest}.so"
    if not library.exists():
        unfinished = library.with_suffix(f".{os.getpid()}")
        command = [compiler, "-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-pthread"]
        subprocess.run([*command, str(SOURCE), "-o", str(unfinished)], check=True)
        unfinished.rename(library)
    return ctypes.CDLL(str(library))


class PureRead:
    """Calling it with a dense tensor reads its bytes once, with ``threads`` threads."""

    def __init__(self, threads: int, sample: torch.Tensor) -> None:
        """Chooses the load width that reads ``sample`` fastest."""
        self._read = _compile().pure_read
        self._read.restype = ctypes.c_uint64
        self._read.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int]
        self.threads = threads
        seconds: dict[int, list[float]] = {16: [], 32: [], 64: []}
        for _ in range(5):
            for self.width, times in seconds.items():
                time.sleep(0.01)  # see harness.time_rounds
                start = time.perf_counter()
                self(sample)
                times.append(time.perf_counter() - start)
        self.width = min(seconds, key=lambda width: statistics.median(seconds[width]))
        words = sample.reshape(-1).view(torch.uint8).numpy().view("uint64")
        assert self(sample) == int(words.sum()), "the pure read must read every byte once"

    def __call__(self, x: torch.Tensor) -> int:
        return int(self._read(x.data_ptr(), x.numel() * x.element_size(), self.threads, self.width))
