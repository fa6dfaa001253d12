"""How two tensors that differ belong together is said where the elements prove it."""

from __future__ import annotations

from typing import Any, Callable

import pytest
import torch

import fastcheck

Change = Callable[[torch.Tensor], torch.Tensor]


def steps(w: torch.Tensor, most: float = 127.0) -> torch.Tensor:
    return w.abs().amax(1, keepdim=True) / most


def quantised(w: torch.Tensor) -> torch.Tensor:
    return (w / steps(w)).round().to(torch.int8)


def second_half_lost(w: torch.Tensor) -> torch.Tensor:
    return torch.cat([w[:3], torch.zeros_like(w[3:])])


PROVED: list[tuple[str, Change]] = [
    ("transposed", lambda w: w.t().contiguous()),
    ("rows in another order", lambda w: w[[1, 0, *range(2, 6)]]),
    ("columns in another order", lambda w: w.flip(1)),
    ("the same elements in another order", lambda w: w.flip(0, 1).flatten().roll(1).view(6, 10)),
    ("the same elements in another shape", lambda w: w.reshape(10, 6)),
    ("cast to bfloat16, nothing else", lambda w: w.bfloat16()),
    ("cast to float8_e4m3fn, nothing else", lambda w: w.to(torch.float8_e4m3fn)),
    ("actual was rounded to bfloat16", lambda w: w.bfloat16().float()),
    ("cast to bfloat16, and rows in another order", lambda w: w.flip(0).bfloat16()),
    ("cast, and transposed", lambda w: w.t().bfloat16()),
    ("negated", lambda w: -w),
    ("multiplied by 8", lambda w: w * 8),
    ("each element is 0.25 more", lambda w: w + 0.25),
    ("each element is 1 less", lambda w: w - 1),
    ("elements 30 to 59 are zeros, the others are equal to the bit", second_half_lost),
    (
        "element 59 differs, the others",
        lambda w: torch.cat([w.flatten()[:-1], w[0, :1] * 2]).view(6, 10),
    ),
    (
        "2 elements from 3 to 50 differ, the others",
        lambda w: w.flatten().index_add(0, torch.tensor([3, 50]), torch.ones(2)).view(6, 10),
    ),
    ("all zeros", torch.zeros_like),
    ("each element is 1.0", torch.ones_like),
    ("it is rows 2 to 4 of reference", lambda w: w[2:5]),
    ("reference is columns 0 to 9 of actual", lambda w: torch.cat([w, w[:, :2]], 1)),
]
NOT_PROVED: list[Change] = [
    lambda w: w + torch.randn_like(w),
    lambda w: w.bfloat16() * 1.01,
    lambda w: w.t() * torch.linspace(1, 1.01, 60).view(10, 6),
    lambda w: w * 1.0001 + 1e-4,
    lambda w: w.to(torch.complex128),
]


@pytest.fixture
def weight() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(6, 10)


def reason(actual: Any, weight: torch.Tensor) -> str:
    found = fastcheck.compare(actual, {"w": weight, "other": torch.ones(1)})
    assert not found.agrees
    (row,) = [row for row in found.rows if row.name == "w"]
    return row.relation


@pytest.mark.parametrize(("text", "change"), PROVED, ids=[text for text, _ in PROVED])
def test_what_the_elements_prove_is_said(text: str, change: Change, weight: torch.Tensor) -> None:
    assert text in reason({"w": change(weight), "other": torch.ones(1)}, weight)


@pytest.mark.parametrize("change", NOT_PROVED)
def test_what_they_do_not_prove_is_not(change: Change, weight: torch.Tensor) -> None:
    text = reason({"w": change(weight), "other": torch.ones(1)}, weight)
    assert not any(known in text for known, _ in PROVED) and "quantised" not in text


def test_of_two_constants_the_one_is_told() -> None:
    found = fastcheck.compare({"w": torch.zeros(9)}, {"w": torch.ones(9)})
    assert [row.relation for row in found.rows] == ["all zeros"]
    assert found.rows[0].reason == "the elements differ"
    found = fastcheck.compare({"w": torch.arange(9) + 1}, {"w": torch.arange(9)})
    assert [row.relation for row in found.rows] == ["each element is 1 more"]


def test_what_rounding_of_bfloat16_hides_is_no_number_more() -> None:
    """Its largest element has one spacing more, and half of the others less than two."""
    reference = torch.full((100,), 0.1).bfloat16()
    reference[0] = 8
    actual = reference.clone()
    actual[0] += 0.0625
    actual[50:] += 0.1
    (row,) = fastcheck.compare({"w": actual}, {"w": reference}).rows
    assert "each element is" not in row.relation and row.error > 0.05


def test_numbers_near_a_constant_are_not_rounded_to_it(weight: torch.Tensor) -> None:
    ones = torch.ones(10)
    found = fastcheck.compare({"w": ones + 1e-3 * weight[0].tanh()}, {"w": ones})
    assert [row.relation for row in found.rows] == [""]


def test_quantised_with_its_scale(weight: torch.Tensor) -> None:
    proved = {"w": quantised(weight), "w_scale": steps(weight)}
    assert "quantised to int8 with the scale w_scale" in reason(proved, weight)
    float8 = (weight / steps(weight, 448.0)).to(torch.float8_e4m3fn)
    found = reason({"w": float8, "w_scale": steps(weight, 448.0)}, weight)
    assert "quantised to float8_e4m3fn with the scale w_scale" in found
    wrong = {"w": quantised(weight), "w_scale": steps(weight) * 1.1}
    assert "quantised" not in reason(wrong, weight)
    assert "quantised" not in reason(
        {"w": quantised(weight.flip(0)), "w_scale": steps(weight)}, weight
    )


@pytest.mark.parametrize(
    ("text", "change"),
    [
        ("transposed: dimensions 1 and 2", lambda w: w.transpose(1, 2).contiguous()),
        ("transposed: as NCHW to NHWC", lambda w: w.permute(0, 2, 3, 1).contiguous()),
        ("transposed: as NHWC to NCHW", lambda w: w.permute(0, 3, 1, 2).contiguous()),
        ("transposed: as OIHW to HWIO", lambda w: w.permute(2, 3, 1, 0).contiguous()),
        ("transposed: as HWIO to OIHW", lambda w: w.permute(3, 2, 0, 1).contiguous()),
        ("transposed: dimensions 1, 2, 0, 3 of reference", lambda w: w.permute(1, 2, 0, 3)),
        ("reversed along dimension 1", lambda w: w.flip(1)),
        ("reversed along dimensions 2 and 3", lambda w: w.flip(2, 3)),
    ],
)
def test_axes_of_images(text: str, change: Change) -> None:
    images = torch.randn(2, 3, 4, 5)
    assert text in reason({"w": change(images), "other": torch.ones(1)}, images)


def test_a_wider_actual_is_told(weight: torch.Tensor) -> None:
    actual = {"w": weight, "other": torch.ones(1)}
    assert "reference is its cast to bfloat16" in reason(actual, weight.bfloat16())


def test_complex_parts_are_not_looked_for() -> None:
    whole = torch.randn(4, 4, dtype=torch.complex128)
    pair = {"n": torch.ones(1), "a": whole}, {"n": torch.ones(1), "b": whole[:2].clone()}
    assert not fastcheck.compare(*pair).notes


def test_other_last_bits_are_no_factor(weight: torch.Tensor) -> None:
    sides = {"w": weight * (1 + 2e-7)}, {"w": weight}
    (row,) = fastcheck.compare(*sides, thresholds={"float32": 1e-9}).rows
    assert row.relation == ""


def test_two_that_were_swapped_name_each_other() -> None:
    one, two = torch.randn(4, 4), torch.randn(4, 4)
    found = fastcheck.compare({"a": two, "b": one}, {"a": one, "b": two})
    reasons = {row.name: row.relation for row in found.rows}
    assert "it is what b is in reference" in reasons["a"]
    assert "it is what a is in reference" in reasons["b"]


def test_zeros_are_no_sign_of_another_tensor() -> None:
    zeros = torch.zeros(4, 4)
    one = torch.ones(4, 4)
    (row,) = fastcheck.compare({"a": zeros, "b": zeros}, {"a": one, "b": zeros}).rows
    assert row.relation == "all zeros"


def test_parts_of_a_fused_tensor_are_named() -> None:
    parts = {name: torch.randn(4, 6) for name in ("query", "key", "value")}
    fused = {"in_proj": torch.cat(list(parts.values()))}
    for actual, reference, sides in (
        (fused, parts, "query of reference is rows 0 to 3 of in_proj of actual"),
        (parts, fused, "query of actual is rows 0 to 3 of in_proj of reference"),
    ):
        found = fastcheck.compare({**actual, "n": torch.ones(1)}, {**reference, "n": torch.ones(1)})
        (note,) = [note for note in found.notes if note.startswith("parts of fused tensors")]
        assert sides in note and "value" in note and not found.agrees
    wrong = {"in_proj": torch.cat([parts["query"], parts["key"], parts["value"] + 1])}
    found = fastcheck.compare({**wrong, "n": torch.ones(1)}, {**parts, "n": torch.ones(1)})
    assert not any("value of reference" in note for note in found.notes)
