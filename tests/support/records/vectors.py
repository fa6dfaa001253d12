"""The fixed vectors of docs/record-format.md, section 9.

``python tests/support/records/vectors.py`` writes vectors.json beside it anew from the reference.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from support.records.reference import (
    DTYPES,
    FLOAT_NAMES,
    TABLE,
    VALUE_BYTES,
    pattern,
    record_of_bytes,
)

PATH = Path(__file__).with_name("vectors.json")


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
