"""Inputs given by formula, and the fixed vectors of docs/record-format.md, section 9.

``python tests/support/records/vectors.py`` writes vectors.json beside it anew from the reference.
reference."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from support.records.reference import DTYPES, FLOAT_NAMES, TABLE, VALUE_BYTES, record_of_bytes

Array = np.ndarray[Any, np.dtype[Any]]
PATH = Path(__file__).with_name("vectors.json")


def splitmix64(count: int, seed: int) -> Array:
    """count words of splitmix64: word k mixes seed + (k + 1) * 0x9E3779B97F4A7C15."""
    z = np.uint64(seed) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def pattern(kind: str, dtype: str, count: int, seed: int = 0) -> bytes:
    """The bytes of ``count`` components.

    ``random``      component k is the low bits of splitmix64 word k: every bit pattern can come
    ``counter``     component k has the bits (seed + k) mod 2^width
    ``constant``    every component has the bits ``seed``
    ``exponent:E``  floats only: sign and mantissa bits are those of word k, the binary exponent is
                    E + (word >> 60)
    """
    row = DTYPES[dtype]
    width = 8 * row.itemsize
    mask = np.uint64((1 << width) - 1)
    if kind == "random":
        bits = splitmix64(count, seed) & mask
    elif kind == "counter":
        bits = (np.uint64(seed) + np.arange(count, dtype=np.uint64)) & mask
    elif kind == "constant":
        bits = np.full(count, seed, np.uint64)
    else:
        word = splitmix64(count, seed)
        bias = (1 << (row.exponent_bits - 1)) - 1
        exponent = (word >> np.uint64(60)) + np.uint64(int(kind.removeprefix("exponent:")) + bias)
        keep = np.uint64(1 << (width - 1) | ((1 << row.mantissa_bits) - 1))
        bits = (word & keep) | (exponent << np.uint64(row.mantissa_bits))
    return bits.astype(f"<u{row.itemsize}").tobytes()


def vector_inputs() -> list[tuple[str, str, int, int]]:
    """(kind, dtype, components, seed) of every fixed vector."""
    cases: list[tuple[str, str, int, int]] = []
    for row in TABLE:
        for count in (0, 1, 2, 3, 64, 65, 1024, 4095, 4096, 4097, 13000):
            if count % row.components == 0:
                cases.append(("random", row.name, count, 1000 * row.code + count))
        if row.itemsize <= 2:
            cases.append(("counter", row.name, 1 << (8 * row.itemsize), 0))
    for name in FLOAT_NAMES:
        row = DTYPES[name]
        moderate = -4 if row.exponent_bits > 4 else -7
        cases.append((f"exponent:{moderate}", name, 20000, 7))
        if row.exponent_bits >= 8:
            for exponent in (
                -126,
                -60,
                -56,
                -55,
                -41,
                44,
                45,
                59,
                60,
                112 if row.exponent_bits == 8 else 900,
            ):
                cases.append((f"exponent:{exponent}", name, 5000, 11))
    cases.append(("exponent:1008", "float64", 9000, 13))  # sum and abs_sum overflow
    for bits in (
        0x00000000,
        0x80000000,
        0x00000001,
        0x7F7FFFFF,
        0x7F800000,
        0xFF800000,
        0x7FC00000,
        0x5D800000,
    ):
        cases.append(("constant", "float32", 5000, bits))
    return cases


def write_vectors(path: Path) -> None:
    rows = []
    for kind, dtype, count, seed in vector_inputs():
        rec = record_of_bytes(pattern(kind, dtype, count, seed), dtype)
        rows.append([kind, dtype, count, seed, rec[:VALUE_BYTES].hex()])
    head = {
        "format": "Record v1, value fields (bytes 0 to 111) at depth full",
        "inputs": "kind, dtype, components, seed: docs/record-format.md, section 9",
    }
    lines = ",\n".join("    " + json.dumps(row) for row in rows)
    text = json.dumps(head, indent=2)[:-2] + ',\n  "vectors": [\n' + lines + "\n  ]\n}\n"
    path.write_text(text)


if __name__ == "__main__":
    write_vectors(PATH)
    sys.exit(0)
