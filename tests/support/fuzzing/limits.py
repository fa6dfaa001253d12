"""Limits the memory that a block of code may allocate."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path

__all__ = ["limited_memory"]


@contextlib.contextmanager
def limited_memory(more_bytes: int) -> Iterator[None]:
    """Within it, this process has at most ``more_bytes`` of address space more than now: an
    allocation beyond it is a MemoryError, or torch's RuntimeError.
    """
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
