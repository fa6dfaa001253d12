"""What several test files need: tensors of given bytes, their records, a diff of two records."""

from __future__ import annotations

import functools
import os
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Optional

import torch

from fastcheck import _C
from reference import DEPTHS, DTYPES, LAYOUT, VALUE_BYTES, fields, record_of_bytes, torch_dtype
from vectors import pattern

# Around the ends of a row, of a run, of a tile and of several tiles; 9 tiles make an uneven tree.
SIZES = (0, 1, 2, 63, 64, 65, 1023, 1024, 1025, 4095, 4096, 4097, 3 * 4096 + 1000, 9 * 4096 + 17)
ISAS = tuple(name for name, supported, _ in _C.cpu_isas() if supported)


def tensor_of(raw: bytes, dtype: str, offset: int = 0) -> torch.Tensor:
    """A 1-d tensor of these bytes that starts ``offset`` bytes after a 64-byte boundary."""
    if not raw:
        return torch.empty(0, dtype=torch_dtype(dtype))
    block = torch.empty(len(raw) + offset + 64, dtype=torch.uint8)
    start = -block.data_ptr() % 64 + offset
    block[start : start + len(raw)] = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    return torch.frombuffer(
        block.numpy().data,
        dtype=torch_dtype(dtype),
        offset=start,
        count=len(raw) // torch_dtype(dtype).itemsize,
    )


def kernel(x: torch.Tensor, depth: str = "full", order: str = "storage") -> bytes:
    """The Record that the extension makes."""
    return _C.record(x, DEPTHS[depth], order == "logical").numpy().tobytes()


@functools.lru_cache(maxsize=256)
def expected(kind: str, dtype: str, count: int, seed: int = 0, depth: str = "full") -> bytes:
    """The reference's Record of a 1-d tensor given by formula, computed once."""
    return record_of_bytes(pattern(kind, dtype, count, seed), dtype, depth=depth)


def kinds(dtype: str) -> tuple[str, ...]:
    """Formulas (tests/vectors.py) that reach every branch of this dtype."""
    row = DTYPES[dtype]
    if row.kind != "float":
        return ("random",)
    if row.itemsize == 1:
        return ("random", f"exponent:{-7 if dtype == 'float8_e4m3fn' else -9}")
    if row.itemsize == 2 and row.exponent_bits == 5:
        return ("random", "exponent:-8")
    return ("random", "exponent:-8", "exponent:-60", "exponent:55")


def even(count: int, dtype: str) -> int:
    """``count`` components, or one more where elements are pairs."""
    return count + count % DTYPES[dtype].components


def assert_same(actual: bytes, wanted: bytes, note: object = "") -> None:
    """Fails with the fields that differ, and their bytes (a NaN or a -0.0 shows only there)."""
    if actual == wanted:
        return
    got, want = fields(actual), fields(wanted)
    differing = []
    for name, (start, code) in LAYOUT.items():
        end = start + struct.calcsize(code)
        if actual[start:end] != wanted[start:end]:
            differing.append(
                f"{name}: got {got[name]!r} ({actual[start:end].hex()}),"
                f" expected {want[name]!r} ({wanted[start:end].hex()})"
            )
    raise AssertionError(f"{note}\n" + "\n".join(differing or ["reserved bytes differ"]))


def values_equal(left: bytes, right: bytes) -> bool:
    return left[:VALUE_BYTES] == right[:VALUE_BYTES]


def every_isa(names: Sequence[str] = ISAS) -> Iterator[str]:
    """Switches to each instruction set in turn, and back at the end."""
    before = _C.cpu_isa()
    try:
        for name in names:
            _C.set_cpu_isa(name)
            assert _C.cpu_isa() == name
            yield name
    finally:
        _C.set_cpu_isa(before)


def run_python(
    code: str, *, env: Optional[dict[str, str]] = None
) -> subprocess.CompletedProcess[str]:
    """Runs ``code`` in a fresh interpreter that can import the tests' modules."""
    here = os.path.dirname(os.path.abspath(__file__))
    path = os.pathsep.join(p for p in (here, os.environ.get("PYTHONPATH")) if p)
    merged = {**os.environ, "PYTHONPATH": path, **(env or {})}
    return subprocess.run(
        [sys.executable, "-c", code], env=merged, capture_output=True, text=True, check=False
    )
