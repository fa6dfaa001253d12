"""Tests of the reference implementation, against exact arithmetic and against itself."""

from __future__ import annotations

import json
import math
import random
import struct
from fractions import Fraction

import numpy as np
import pytest
import torch

from support.records.reference import (
    DTYPES,
    FLOAT_NAMES,
    VALUE_BYTES,
    bit_patterns,
    checksum,
    checksum_plain,
    classify,
    decode,
    exact_fma64,
    fma32,
    fma64,
    is_dense,
    pattern,
    record_of_bytes,
    sums,
    traversal,
)
from support.records.torch_dtypes import torch_dtype
from support.records.vectors import PATH, vector_inputs


def round_once(value: Fraction, bits: int, lowest_exponent: int) -> Fraction:
    """The nearest number with ``bits`` bits and no bit below 2**lowest_exponent, ties to even."""
    if value == 0:
        return value
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    if abs(value) < Fraction(2) ** exponent:
        exponent -= 1
    unit = Fraction(2) ** max(exponent - bits + 1, lowest_exponent)
    return round(value / unit) * unit  # round() of a Fraction goes to even at ties


def float32_cases(count: int) -> list[tuple[float, float]]:
    """(x, acc) whose exact sum is at, or a hair beside, the midpoint of two float32, and others."""
    rng = random.Random(5)
    cases = []
    for _ in range(count):
        x = rng.choice([1.0, -1.0]) * math.ldexp(
            rng.randrange(1 << 23, 1 << 24), rng.randrange(-80, 40)
        )
        square = Fraction(x) ** 2
        shift = rng.randrange(-3, 30)
        acc = math.ldexp(rng.randrange(1 << 23, 1 << 24), math.frexp(float(square))[1] - 23 + shift)
        cases.append((x, acc))
        # x = 2^k: x*x is a single bit, half a unit in the last place of acc, or a bit more
        power = rng.randrange(-74, 10)
        odd = float(rng.randrange(1 << 23, 1 << 24))
        cases.append((math.ldexp(1.0, power), math.ldexp(odd, 2 * power + 1)))
        cases.append((math.ldexp(1.0 + 2.0**-23, power), math.ldexp(odd, 2 * power + 1)))
        # a square of 25 bits is such a midpoint, and an acc too small for float64 to keep decides
        midpoint = float(rng.randrange(4097, 5792, 2))
        cases.append((midpoint, math.ldexp(rng.choice([1.0, -1.0]) * odd, -60)))
        # results among the float32 subnormals
        cases.append((math.ldexp(rng.random(), -70), math.ldexp(rng.randrange(0, 1 << 10), -149)))
    return [
        (float(np.float32(x)), float(np.float32(a))) for x, a in cases if a < 3e38 and abs(x) < 1e19
    ]


def test_fma32_rounds_once() -> None:
    cases = float32_cases(1500)
    x = np.array([c[0] for c in cases], np.float32)
    acc = np.array([c[1] for c in cases], np.float32)
    expected = [round_once(Fraction(x) ** 2 + Fraction(a), 24, -149) for x, a in cases]
    assert [Fraction(float(v)) for v in fma32(x, x, acc)] == expected
    # the cases are hard enough to catch rounding twice, and a multiply and add that are not fused
    with np.errstate(under="ignore", over="ignore"):
        twice = (x.astype(np.float64) ** 2 + acc.astype(np.float64)).astype(np.float32)
        unfused = x * x + acc
    assert [Fraction(float(v)) for v in twice] != expected
    assert [Fraction(float(v)) for v in unfused] != expected


def test_fma64_rounds_once() -> None:
    rng = random.Random(6)
    cases = []
    for _ in range(4000):
        x = math.ldexp(
            rng.randrange(1 << 52, 1 << 53), rng.choice([-600, -560, -120, -52, -20, 0, 200, 450])
        )
        near = 2 * math.frexp(x)[1] - 53 + rng.randrange(-60, 60)
        acc = math.ldexp(rng.randrange(1 << 52, 1 << 53), max(min(near, 970), -1074))
        cases.append((x, rng.choice([acc, 0.0, 5e-324, 1.0])))
        power = rng.randrange(-90, 90)
        cases.append(
            (
                math.ldexp(1.0 + 2.0**-52, power),
                math.ldexp(rng.randrange(1 << 52, 1 << 53), 2 * power + 1),
            )
        )
    expected = []
    for x, a in cases:
        exact = round_once(Fraction(x) ** 2 + Fraction(a), 53, -1074)
        expected.append(float(exact) if exact < Fraction(2) ** 1024 else math.inf)
    xs, accs = np.array([c[0] for c in cases]), np.array([c[1] for c in cases])
    assert fma64(xs, xs, accs).tolist() == expected
    assert [exact_fma64(x, x, a) for x, a in cases] == expected
    with np.errstate(over="ignore"):
        assert (xs * xs + accs).tolist() != expected


def plain_sums(values: list[float], narrow: bool) -> list[float]:
    """Section 6 for one stream of finite values, a number at a time, in Fractions."""

    def rounded(value: Fraction, wide: bool = False) -> Fraction:
        return round_once(value, 53, -1074) if wide or not narrow else round_once(value, 24, -149)

    tiles = []
    for start in range(0, len(values), 4096):
        tile = [Fraction(v) for v in values[start : start + 4096]]
        largest = max(abs(v) for v in tile)
        scale = Fraction(1)
        if narrow and largest > 2**60:
            scale = Fraction(1, 2**96)
        if narrow and 0 < largest < Fraction(1, 2**40):
            scale = Fraction(2**96)
        lanes: list[list[Fraction]] = [[], [], []]
        for lane in range(64):
            runs = []
            for run in range(4):
                total = [Fraction(0)] * 3
                for row in range(16 * run, 16 * run + 16):
                    if row * 64 + lane < len(tile):
                        x = rounded(tile[row * 64 + lane] * scale)
                        terms = (x, abs(x), x * x)
                        total = [rounded(a + b) for a, b in zip(total, terms, strict=True)]
                runs.append(total)
            for k in range(3):
                r = [run[k] for run in runs]
                lane_value = rounded(rounded(r[0] + r[1]) + rounded(r[2] + r[3]))
                lanes[k].append(lane_value / scale ** (2 if k == 2 else 1))
        for k in range(3):
            while len(lanes[k]) > 1:
                lanes[k] = [
                    rounded(a + b, True) for a, b in zip(lanes[k][::2], lanes[k][1::2], strict=True)
                ]
        tiles.append([lane[0] for lane in lanes])
    while len(tiles) & (len(tiles) - 1):
        tiles.append([Fraction(0)] * 3)
    while len(tiles) > 1:
        tiles = [
            [rounded(x + y, True) for x, y in zip(a, b, strict=True)]
            for a, b in zip(tiles[::2], tiles[1::2], strict=True)
        ]
    return [float(v) for v in tiles[0]]


@pytest.mark.parametrize(
    ("name", "kind", "count"),
    [
        ("float32", "exponent:-4", 4096 + 70),
        ("float32", "exponent:50", 700),
        ("float32", "exponent:-60", 700),
        ("float32", "exponent:-126", 200),
        ("bfloat16", "exponent:100", 300),
        ("float8_e5m2", "exponent:-4", 1500),
        ("float64", "exponent:-4", 1500),
        ("int64", "random", 700),
        ("uint64", "random", 700),
    ],
)
def test_sums_against_fractions(name: str, kind: str, count: int) -> None:
    row = DTYPES[name]
    bits = bit_patterns(pattern(kind, name, count, 3), row)
    values = decode(bits, row)
    narrow = row.kind == "float" and row.itemsize <= 4
    exact = [float(v) for v in values]
    assert plain_sums(exact, narrow) == sums(values, np.ones(count, bool), row).tolist()


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_decode_agrees_with_torch(name: str) -> None:
    row = DTYPES[name]
    raw = pattern("counter", name, 1 << (8 * row.itemsize))
    bits = bit_patterns(raw, row)
    finite = classify(bits, row)["finite"]
    theirs = torch.frombuffer(bytearray(raw), dtype=torch_dtype(name)).to(torch.float32).numpy()
    assert (np.isfinite(theirs) == finite).all()
    assert decode(bits, row)[finite].tobytes() == theirs[finite].tobytes()


@pytest.mark.parametrize("name", FLOAT_NAMES)
def test_classes_agree_with_torch(name: str) -> None:
    row = DTYPES[name]
    raw = pattern("random", name, 60000, 9)
    classes = classify(bit_patterns(raw, row), row)
    component = torch_dtype({"complex64": "float32", "complex128": "float64"}.get(name, name))
    info = torch.finfo(component)
    x = torch.frombuffer(bytearray(raw), dtype=component).to(torch.float64)
    assert (torch.isnan(x).numpy() == classes["nan"]).all()
    assert ((x == math.inf).numpy() == classes["posinf"]).all()
    assert ((x == -math.inf).numpy() == classes["neginf"]).all()
    assert ((x == 0).numpy() == classes["zero"]).all()
    assert (((x != 0) & (x.abs() < info.smallest_normal)).numpy() == classes["subnormal"]).all()
    assert ((x.abs() == info.max).numpy() == classes["saturated"]).all()
    assert (((x < 0) & torch.isfinite(x)).numpy() == classes["negative"]).all()


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
def test_checksum_for_all_chains_at_once(itemsize: int) -> None:
    for size in (0, 1, 3, 4, 5, 63, 64, 4095, 4096, 4097, 40000):
        raw = pattern("random", f"uint{8 * itemsize}", size, size)[: size * itemsize]
        assert checksum(raw, itemsize) == checksum_plain(raw, itemsize)
    assert checksum(b"abc", 1) == checksum_plain(b"abc", 1)


def test_traversal_reads_the_elements_in_order() -> None:
    x = torch.arange(24, dtype=torch.int16).reshape(2, 3, 4)

    def read(t: torch.Tensor, order: str) -> tuple[list[int], str]:
        raw, used = traversal(t, order)
        return list(struct.unpack(f"<{len(raw) // 2}h", raw)), used

    for view in (x, x.permute(2, 0, 1), x[:, 1:, ::2], x[1, 2, 3], x[:, :0], x[:1].expand(3, 3, 4)):
        assert read(view, "logical") == (view.flatten().tolist(), "logical")
    assert read(x.permute(2, 0, 1), "storage") == (list(range(24)), "storage")
    assert read(x[1].t(), "storage") == (list(range(12, 24)), "storage")
    assert read(x[:, 1:], "storage")[1] == "logical"
    assert is_dense(x.unsqueeze(1).permute(3, 1, 2, 0))


def test_vectors_are_those_of_the_reference() -> None:
    rows = json.loads(PATH.read_text())["vectors"]
    assert [tuple(row[:4]) for row in rows] == vector_inputs()
    for kind, name, count, seed, expected in rows:
        rec = record_of_bytes(pattern(kind, name, count, seed), name)
        assert rec[:VALUE_BYTES].hex() == expected, (kind, name, count, seed)
