"""Every bit pattern of the small dtypes, and the special codes of the large ones, in a Record."""

from __future__ import annotations

import math

import numpy as np
import pytest

from support.helpers import assert_same, every_isa, kernel, swept, tensor_of
from support.records.reference import (
    DTYPES,
    EIGHT_COUNTS,
    FLOAT_NAMES,
    TILE,
    bit_patterns,
    classify,
    decode,
    fields,
    pattern,
    record_of_bytes,
)
from support.records.special_codes import special_codes

pytestmark = pytest.mark.fake_statistics


@pytest.mark.parametrize("dtype", [n for n, row in DTYPES.items() if row.itemsize <= 2])
def test_every_code_in_every_place(dtype: str) -> None:
    """All codes in sequence; the start shifts, so that a code meets other lanes, rows and tails."""
    codes = 1 << (8 * DTYPES[dtype].itemsize)
    shifts = range(0, 256, 5) if codes == 256 else (0, 1, 77, 4095, 32768)
    for shift in swept(shifts, 5):
        raw = pattern("counter", dtype, codes + shift % 67, shift)
        x = tensor_of(raw, dtype, shift % 64 // 2 * 2)
        wanted = record_of_bytes(raw, dtype)
        for isa in every_isa():
            assert_same(kernel(x), wanted, (isa, shift))


@pytest.mark.parametrize("dtype", [n for n, row in DTYPES.items() if row.itemsize == 1])
def test_every_code_alone(dtype: str) -> None:
    for code in swept(range(256), 32):
        raw = bytes([code])
        wanted = record_of_bytes(raw, dtype)
        for isa in every_isa():
            assert_same(kernel(tensor_of(raw, dtype)), wanted, (isa, hex(code)))


@pytest.mark.parametrize("dtype", FLOAT_NAMES)
def test_special_codes_alone_and_among_others(dtype: str) -> None:
    row = DTYPES[dtype]
    unit = row.components
    for code in swept(special_codes(dtype), 12):
        component = code.to_bytes(row.itemsize, "little")
        alone = component + bytes(row.itemsize) * (unit - 1)
        moderate = "exponent:-7" if row.exponent_bits == 4 else "exponent:-8"
        among = bytearray(pattern(moderate, dtype, TILE + 130, code & 0xFFFF))
        for place in (0, 17, 63, 64, 1023, 1024, 2049, 4095, 4096, 4225):
            at = place * row.itemsize
            among[at : at + row.itemsize] = component
        for raw in (alone, bytes(among)):
            wanted = record_of_bytes(raw, dtype)
            for isa in every_isa():
                assert_same(kernel(tensor_of(raw, dtype)), wanted, (isa, hex(code), len(raw)))


@pytest.mark.parametrize("dtype", FLOAT_NAMES)
def test_each_special_code_has_its_own_class(dtype: str) -> None:
    """Spelt out apart from the reference: what one code of each kind must count as."""
    row = DTYPES[dtype]
    width = 8 * row.itemsize
    largest = {"float8_e4m3fn": 0x7E}.get(dtype, (1 << (width - 1)) - (1 << row.mantissa_bits) - 1)
    minus = 1 << (width - 1)
    rows = [
        (0, {"zero_count"}),
        (minus, {"zero_count"}),
        (1, {"subnormal_count"}),
        (minus | 1, {"subnormal_count", "negative_count"}),
        (1 << row.mantissa_bits, set()),
        (largest, {"saturated_count"}),
        (minus | largest, {"saturated_count", "negative_count"}),
        (minus - 1, {"nan_count"}),
        (2 * minus - 1, {"nan_count"}),
    ]
    if dtype != "float8_e4m3fn":
        rows += [(largest + 1, {"posinf_count"}), (minus | largest + 1, {"neginf_count"})]
        rows += [(largest + 2, {"nan_count"})]
    repeat = 20
    for code, wanted in rows:
        raw = code.to_bytes(row.itemsize, "little") * repeat
        for isa in every_isa():
            got = fields(kernel(tensor_of(raw, dtype)))
            counted = {name for name in EIGHT_COUNTS[1:] if got[name]}
            assert counted == wanted, (isa, hex(code))
            assert all(got[name] == repeat for name in wanted)
            finite = not wanted & {"nan_count", "posinf_count", "neginf_count"}
            value = float(decode(bit_patterns(raw, row), row)[0]) if finite else None
            assert (got["min"], got["max"]) == ((value, value) if finite else (math.inf, -math.inf))
            assert math.copysign(1, got["min"]) == (
                1 if not finite or not value else math.copysign(1, value)
            )


def test_classes_partition() -> None:
    for dtype in FLOAT_NAMES:
        row = DTYPES[dtype]
        classes = classify(bit_patterns(pattern("random", dtype, 4000, 1), row), row)
        kinds_of = np.stack([classes[name] for name in ("nan", "posinf", "neginf", "finite")])
        assert (kinds_of.sum(axis=0) == 1).all()
