"""The distance of two tensors against simple references, and the thresholds of equality."""

from __future__ import annotations

import itertools
import math
import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fastcheck
from fastcheck.comparison.align import _closest
from fastcheck.comparison.block import SOME, UNKNOWN_COUNT
from fastcheck.comparison.measure import REASONS, PairState, measure_records
from fastcheck.comparison.names import Renaming, _fitted
from fastcheck.record.format import DTYPES
from fastcheck.statistics import elements as elements_module
from fastcheck.statistics.elements import compare_elements
from fastcheck.statistics.thresholds import THRESHOLDS, coarser_of, make_thresholds
from support.processes import run_code

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
FLOATS += [torch.float8_e4m3fn, torch.float8_e5m2]


def record(x: torch.Tensor, **changes: Any) -> np.ndarray:
    made = np.array([fastcheck.stats(x, order="logical").record])
    for field, value in changes.items():
        made[field] = value
    return made


def measured(a: np.ndarray, b: np.ndarray) -> tuple[str, str, float]:
    formats = coarser_of(a["dtype"], b["dtype"])
    found = measure_records(a, b, make_thresholds(), formats)
    return PairState(found.states[0]).name, REASONS[found.reasons[0]], float(found.errors[0])


# Elements


def reference(a: torch.Tensor, b: torch.Tensor) -> dict[str, float]:
    """One element at a time, in Python's floats."""
    pairs = [(float(x), float(y)) for x, y in zip(a.flatten(), b.flatten())]
    finite = [(x, y) for x, y in pairs if math.isfinite(x) and math.isfinite(y)]
    tiny = float(torch.finfo(b.dtype).tiny)

    def same(x: float, y: float) -> bool:
        return x == y or (math.isnan(x) and math.isnan(y))

    apart = [abs(x - y) for x, y in finite]
    norms = [math.sqrt(math.fsum(z * z for z in side)) for side in zip(*finite)] or [0.0, 0.0]
    return {
        "cosine": math.fsum(x * y for x, y in finite) / (norms[0] * norms[1])
        if norms[0] * norms[1]
        else float(norms == [0.0, 0.0]),
        "max_abs": max(apart, default=0.0),
        "max_rel": max((abs(x - y) / max(abs(y), tiny) for x, y in finite), default=0.0),
        "within_1000": sum(abs(x - y) <= abs(y) / 1000 for x, y in finite) / (len(finite) or 1)
        if finite
        else 1.0,
        "within_200": sum(abs(x - y) <= abs(y) / 200 for x, y in finite) / (len(finite) or 1)
        if finite
        else 1.0,
        "euclidean": math.sqrt(math.fsum(z * z for z in apart)),
        "nonfinite": sum(
            not (math.isfinite(x) and math.isfinite(y)) and not same(x, y) for x, y in pairs
        ),
        "differing": sum(not same(x, y) for x, y in pairs),
    }


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("chunk", [7, 1 << 20])
def test_elements_agree_with_the_obvious(
    dtype: torch.dtype, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elements_module, "_CHUNK", chunk)
    generator = torch.Generator().manual_seed(0)
    b = (torch.randn(40, generator=generator) * 4).to(dtype)
    a = (b.float() * (1 + 0.02 * torch.randn(40, generator=generator))).to(dtype)
    a[3] = float("nan")
    b[4] = a[4] = float("nan")
    if dtype is not torch.float8_e4m3fn:
        a[5], b[6] = float("inf"), -float("inf")
    a[7] = b[7] = 0.0
    a[8], b[8] = 0.5, 0.0
    got, want = compare_elements(a, b), reference(a, b)
    for name, value in want.items():
        assert getattr(got, name) == pytest.approx(value, rel=1e-12), name
    assert got.first == min(
        i
        for i, (x, y) in enumerate(zip(a.tolist(), b.tolist()))
        if x != y and not (x != x and y != y)
    )


def test_the_first_difference_is_found_in_any_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elements_module, "_CHUNK", 7)
    x = torch.zeros(5, 6)
    for index in (0, 6, 7, 20, 29):
        y = x.clone()
        y.view(-1)[index:] = 1.0
        assert compare_elements(y, x).first == index


def representable(dtype: torch.dtype) -> torch.Tensor:
    """All finite numbers of a narrow format, in order, zero once."""
    bits = torch.arange(256 if dtype.itemsize == 1 else 65536)
    whole = bits.to(torch.uint8 if dtype.itemsize == 1 else torch.int32)
    raw = whole.view(dtype) if dtype.itemsize == 1 else whole.to(torch.int16).view(dtype)
    numbers = raw.double()
    return torch.unique(numbers[numbers.isfinite()])


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
)
def test_ulp_counts_the_numbers_between(dtype: torch.dtype) -> None:
    numbers = representable(dtype)
    zero = int((numbers == 0).nonzero())
    places = [0, 1, zero - 1, zero, zero + 1, zero + 5, len(numbers) // 3, len(numbers) - 1]
    for i, j in itertools.product(places, repeat=2):
        pair = [numbers[k].to(dtype).reshape(1) for k in (i, j)]
        assert compare_elements(*pair).max_ulp == abs(i - j), (i, j)
    minus_zero = torch.tensor([-0.0]).to(dtype)
    assert compare_elements(minus_zero, torch.tensor([0.0]).to(dtype)).max_ulp == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ulp_of_wide_formats_and_across_zero(dtype: torch.dtype) -> None:
    one = torch.ones(1, dtype=dtype)
    for count in (1, 2, 5):
        x = one
        for _ in range(count):
            x = torch.nextafter(x, torch.tensor([2.0], dtype=dtype))
        assert compare_elements(x, one).max_ulp == count
    tiny = torch.nextafter(torch.zeros(1, dtype=dtype), one)
    assert compare_elements(tiny, -tiny).max_ulp == 2
    largest = torch.tensor([torch.finfo(dtype).max], dtype=dtype)
    far = compare_elements(largest, -largest).max_ulp
    assert far is not None and far > 2 ** (one.element_size() * 8 - 2)
    assert compare_elements(one.to(torch.bfloat16), one * 1.001).max_ulp == 0  # in bfloat16


def test_integers_are_not_rounded_together() -> None:
    a = torch.tensor([2**60, 7])
    b = torch.tensor([2**60 + 1, 7])
    found = compare_elements(a, b)
    assert found.differing == 1 and found.first == 0 and found.max_ulp is None
    assert not fastcheck.compare({"w": a}, {"w": b}).agrees


def test_views_of_all_kinds_and_complex_numbers() -> None:
    x = torch.randn(6, 4, dtype=torch.complex64)
    y = x.clone()
    y[2, 1] += 1e-3j
    for view in (lambda t: t, lambda t: t.t(), lambda t: t[::2], lambda t: t.conj()):
        found = compare_elements(view(x), view(y))
        assert found.differing == 1
        assert found.max_abs == pytest.approx(1e-3, rel=1e-3)


# Records


@pytest.mark.parametrize("info", DTYPES, ids=lambda info: info.name)
def test_a_record_is_the_same_as_itself(info: Any) -> None:
    dtype = getattr(torch, info.name, None)
    if dtype is None:
        pytest.skip(f"this torch has no {info.name}")
    x = torch.arange(50).remainder(2 if info.name == "bool" else 100).to(dtype)
    assert measured(record(x), record(x)) == ("CLOSE", "", 0.0)
    assert fastcheck.compare({"x": x}, {"x": x.clone()}).is_identical


@pytest.mark.parametrize("name", list(THRESHOLDS))
def test_thresholds_hold_in_both_directions(name: str) -> None:
    """By statistics as by elements: half of what is allowed is close, twice is not."""
    dtype = getattr(torch, name)
    allowed = THRESHOLDS[name].error
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(4000, generator=generator, dtype=torch.float64)
    x = (wide.sign() * wide.abs().clamp(min=0.1)).to(dtype)
    base = record(x)
    for factor, state in ((0.4, "CLOSE"), (2.5, "DIFFERENT")):
        scale = 1 + factor * allowed
        other = record(x)
        for field in ("sum", "abs_sum", "min", "max"):
            other[field] *= scale
        other["sum_sq"] *= scale * scale
        other["checksum"] += 1
        found = measured(other, base)
        assert found[0] == state, found
        assert found[2] == pytest.approx(factor * allowed, rel=0.01)
    if x.element_size() >= 4 and not x.is_complex():  # narrow formats can't show half a threshold
        assert fastcheck.compare({"x": x * (1 + 0.4 * allowed)}, {"x": x}).agrees
        assert not fastcheck.compare({"x": x * (1 + 2.5 * allowed)}, {"x": x}).agrees


def test_one_element_far_off_is_not_lost_in_a_large_tensor() -> None:
    x = torch.randn(1_000_000, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    y = x.clone()
    y[1234] += 4.0
    comparison = fastcheck.compare({"x": y}, {"x": x})
    found = comparison["weights"].found
    assert found is not None and found.row.reason == "one element is far off"


def test_each_statistic_alone_is_noticed() -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    base = record(x)
    for changes, reason in (
        ({"numel": 999}, "another number of elements"),
        ({"nan_count": 1}, "NaN or infinities on one side"),
        ({"neginf_count": 1}, "NaN or infinities on one side"),
        ({"sum_sq": base["sum_sq"] * 1.01}, "the norms differ"),
        ({"abs_sum": base["abs_sum"] * 1.01}, "the sums of magnitudes differ"),
        ({"sum": base["sum"] + base["abs_sum"] * 0.01}, "the sums differ"),
        ({"min": base["min"] * 1.1}, "the smallest elements differ"),
        ({"max": base["max"] * 1.1}, "the largest elements differ"),
    ):
        other = record(x, checksum=1, **changes)
        assert measured(other, base)[:2] == ("DIFFERENT", reason)
    assert measured(record(x, checksum=1), base)[0] == "REORDERED"
    assert measured(record(x[torch.randperm(1000)]), base)[0] == "REORDERED"
    assert measured(record(-x), base)[0] == "DIFFERENT"


def test_integers_have_no_tolerance() -> None:
    x = torch.arange(1000)
    y = x.clone()
    y[17] += 1
    assert measured(record(y), record(x))[0] == "DIFFERENT"
    lowest = torch.tensor([-(2**63), 0])
    assert measured(record(lowest), record(lowest + 1))[0] == "DIFFERENT"
    large = torch.tensor([2**60])
    assert measured(record(large), record(large + 1))[0] == "DIFFERENT"


def test_a_lesser_depth_compares_what_it_has() -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    for depth in ("health", "stats"):
        made = np.array([fastcheck.stats(x, record=depth).record])
        assert measured(made, record(x)) == ("CLOSE", "", 0.0)
        assert measured(record(x), made) == ("CLOSE", "", 0.0)
    health = np.array([fastcheck.stats(x.relu(), record="health").record])
    assert measured(health, record(x))[:2] == ("DIFFERENT", "the counts differ")


def test_unknown_counts_are_no_difference_and_some_is_not_none() -> None:
    x = torch.randn(100)
    unknown = {f"{n}_count": UNKNOWN_COUNT for n in ("zero", "subnormal", "negative", "saturated")}
    base = record(x)
    assert measured(record(x, **unknown), base)[0] != "DIFFERENT"
    some = record(x, nan_count=SOME, posinf_count=UNKNOWN_COUNT, neginf_count=UNKNOWN_COUNT)
    assert measured(some, base)[1] == "NaN or infinities on one side"
    x[0] = float("nan")
    assert measured(some, record(x))[1] != "NaN or infinities on one side"


# Alignment


@given(
    st.lists(st.floats(0.1, 100), min_size=1, max_size=5),
    st.lists(st.floats(0.1, 100), min_size=1, max_size=7),
)
def test_calls_are_matched_at_the_least_distance(left: list[float], right: list[float]) -> None:
    """Against all ways to choose."""

    def made(norms: list[float]) -> np.ndarray:
        records = np.zeros(len(norms), record(torch.ones(1)).dtype)
        records["sum_sq"] = np.square(norms)
        return records

    def cost(pairs: list[tuple[int, int]]) -> float:
        return sum(abs(left[i] - right[j]) / max(left[i], right[j]) for i, j in pairs)

    got = _closest(made(left), made(right))
    few, many = sorted((len(left), len(right)))
    ways = [
        [(i, j) if len(left) <= len(right) else (j, i) for i, j in enumerate(chosen)]
        for chosen in itertools.combinations(range(many), few)
    ]
    assert len(got) == few and got == sorted(got)
    assert cost(got) == pytest.approx(min(map(cost, ways)))


# Names


@pytest.mark.parametrize(
    ("rules", "path", "renamed"),
    [
        ({"a": "b"}, "a.c", "b.c"),
        ({"a": "b"}, "ab.c", "ab.c"),
        ({"a": "b"}, "x.a", "x.a"),
        ({"a": ""}, "a.c", "c"),
        ({"a": "x", "a.b": "y"}, "a.b.c", "y.c"),
        ({"layers.*.attn": "blocks.*.self"}, "layers.11.attn.q", "blocks.11.self.q"),
        ({"*.0.*": "*.first.*"}, "m.0.w", "m.first.w"),
        ({"l*": "b*"}, "l12.w", "b12.w"),
        ({"a.b": "b"}, "a.b", "b"),
        ({"a": "b", "b": "c"}, "a", "b"),
    ],
)
def test_renaming(rules: dict[str, str], path: str, renamed: str) -> None:
    assert Renaming.of(rules)(path) == renamed


RULES = st.text("ab*.", max_size=8)


@given(RULES | RULES.map("**.".__add__), st.text("ab.", max_size=10))
def test_a_rule_fits_as_a_regular_expression_would(rule: str, path: str) -> None:
    """Each * stands for as much as it can of one part of the name, from the left; ``**.`` in front
    for as few parts as it can, or none.
    """
    lead, rest = (r"(?:(.*?)\.)??", rule[3:]) if rule.startswith("**.") else ("", rule)
    match = re.match(lead + re.escape(rest).replace(r"\*", "([^.]*)") + r"(?=\.|$)", path)
    expected = None if match is None else ([*match.groups("")], path[match.end() :])
    assert _fitted(rule, path) == expected


def test_a_rule_of_many_stars_ends() -> None:
    assert Renaming.of({"*a" * 30 + "b": "x"})("a" * 5_000) == "a" * 5_000


def test_importing_the_package_leaves_the_function_in_place() -> None:
    done = run_code(
        "import fastcheck; import fastcheck.comparison.align; assert callable(fastcheck.compare);"
        "import torch; assert fastcheck.compare({'a': torch.ones(2)}, {'a': torch.ones(2)})",
        is_fresh=True,
    )
    assert done.returncode == 0, done.stderr
