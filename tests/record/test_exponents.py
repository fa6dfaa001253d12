"""Shares that follow from exponent counts, against rounding the tensors themselves."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
import torch

import fastcheck
from fastcheck import ConfigError
from fastcheck.record.number_formats import BLOCK_FORMATS, NUMBER_FORMATS
from fastcheck.types import Exponents, Share

FORMATS = sorted(NUMBER_FORMATS)
FLOAT4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)


def tensors() -> list[torch.Tensor]:
    """Gradients over many binades, weights, an activation behind a ReLU; powers of two, which lie
    on the limits themselves, are frequent in bfloat16 and float8.
    """
    g = torch.Generator().manual_seed(3)
    normal = torch.randn(64 * 64, generator=g)
    wide = normal * torch.exp2(torch.rand(64 * 64, generator=g) * 40 - 30)
    return [
        normal * 0.02,
        wide,
        wide.bfloat16(),
        (wide * 2.0**-20).bfloat16(),
        normal.relu().half(),
        wide.to(torch.float8_e5m2),
        torch.exp2(torch.randint(-40, 20, (1000,), generator=g).float()),
    ]


def overflows(x: torch.Tensor, name: str) -> torch.Tensor:
    """Where a cast gives no neighbour of x: an infinity, a NaN or, of float8_e4m3fn in new releases
    of torch, the largest number although x is more than half a unit above it.
    """
    y = x.to(getattr(torch, name)).float()
    half_unit = 16.0  # of float8_e4m3fn, from 256 on
    return ~y.isfinite() | ((x.abs() - y.abs() > half_unit) & (name == "float8_e4m3fn"))


def rounded(x: torch.Tensor, name: str, scale: float) -> torch.Tensor:
    return (x.double() * scale).float().to(getattr(torch, name)).float()


@pytest.mark.parametrize("name", FORMATS)
def test_shares_are_those_of_casting(name: str) -> None:
    for x in tensors():
        found = fastcheck.exponents(x)
        is_counted = x.double() != 0
        whole = int(is_counted.sum())
        assert found.count == whole
        for power in range(-24, 40, 3):
            y = rounded(x, name, 2.0**power)
            zeros = int((is_counted & (y == 0)).sum()) / whole
            assert found.share_below(name, 2.0**power) == Share(zeros, zeros), power

            over = int(overflows((x.double() * 2.0**power).float(), name).sum()) / whole
            above = found.share_above(name, 2.0**power)
            assert above.least <= over <= above.most, power
            # What matters most is exact: whether anything overflows.
            assert (above.most == 0) == (over == 0), power
            magnitudes = x.double().abs()[is_counted] * 2.0**power
            form = NUMBER_FORMATS[name]
            small = magnitudes <= 2.0**form.least_exponent
            kept = int((small & (magnitudes > 2.0**form.zero_exponent)).sum()) / whole
            subnormal = found.share_subnormal(name, 2.0**power)
            assert subnormal.least <= kept <= subnormal.most, power


@pytest.mark.parametrize("name", FORMATS)
def test_bounds_at_a_scale_that_is_no_power_of_two(name: str) -> None:
    for x in tensors():
        found = fastcheck.exponents(x)
        for scale in (0.3, 700.0, 1.3 * 2.0**-14):
            y = rounded(x, name, scale)
            zeros = int(((x.double() != 0) & (y == 0)).sum()) / found.count
            below = found.share_below(name, scale)
            assert below.least <= zeros <= below.most
            over = int(overflows((x.double() * scale).float(), name).sum()) / found.count
            above = found.share_above(name, scale)
            assert above.least <= over <= above.most


@pytest.mark.parametrize("name", FORMATS)
def test_limits_are_torchs(name: str) -> None:
    form, dtype = NUMBER_FORMATS[name], getattr(torch, name)
    info = torch.finfo(dtype)
    assert (form.largest, 2.0**form.least_exponent) == (info.max, info.tiny)
    limit = torch.tensor(form.overflow_from)
    after = torch.nextafter(limit, torch.tensor(math.inf))
    before = torch.nextafter(limit, torch.tensor(0.0))
    assert not overflows(before, name)
    assert bool(overflows(limit, name)) == form.ties_overflow
    assert overflows(after, name)
    zero = torch.tensor(2.0**form.zero_exponent)
    assert float(zero.to(dtype)) == 0
    assert float((zero * 1.01).to(dtype)) > 0
    # And the counts decide it there: at the limit itself, and just above and below.
    for x in (before, limit, after, zero, zero * 1.01):
        y = x.view(1).to(dtype).float()
        found = fastcheck.exponents(x.view(1))
        assert found.share_above(name) == Share(*2 * [float(overflows(x, name))])
        assert found.share_below(name) == Share(*2 * [float(y == 0)])


def blocks_of(x: torch.Tensor, size: int) -> torch.Tensor:
    values = x.double().flatten()
    return torch.nn.functional.pad(values, (0, -len(values) % size)).view(-1, size)


def nearest_float4(x: torch.Tensor) -> torch.Tensor:
    """Ties to the even mantissa; what is larger becomes 6."""
    far = (x.abs().unsqueeze(-1) - FLOAT4).abs()
    tie = far == far.amin(-1, keepdim=True)
    even = torch.arange(8) % 2 == 0
    choice = torch.where((tie & even).any(-1), (tie & even).int().argmax(-1), tie.int().argmax(-1))
    return FLOAT4[choice] * x.sign()


def element_rounded(x: torch.Tensor, name: str) -> torch.Tensor:
    if name == "float4_e2m1":
        return nearest_float4(x)
    largest = NUMBER_FORMATS[name].largest
    return x.clamp(-largest, largest).float().to(getattr(torch, name)).double()


def block_rounded(x: torch.Tensor, name: str) -> torch.Tensor:
    """The quantisers, from the specifications."""
    form = BLOCK_FORMATS[name]
    blocks = blocks_of(x, form.block)
    maxima = blocks.abs().amax(1, keepdim=True)
    if name == "nvfp4":
        tensor_scale = float(blocks.abs().max()) / (448 * 6)
        scale = (maxima / 6 / tensor_scale).float().to(torch.float8_e4m3fn).double() * tensor_scale
        divided = torch.where(scale > 0, blocks / scale, 0.0)
    else:
        last = int(math.log2(form.element.largest))
        exponents = (torch.frexp(maxima)[1] - 1 - last).clamp(-127, 127)
        scale = torch.exp2(exponents.double())
        divided = blocks / scale
    return element_rounded(divided, form.element.name) * scale


@pytest.mark.parametrize("name", sorted(BLOCK_FORMATS))
def test_shares_of_block_formats(name: str) -> None:
    form = BLOCK_FORMATS[name]
    for x in tensors():
        found = fastcheck.exponents(x)
        blocks = blocks_of(x, form.block)
        lost = int(((blocks != 0) & (block_rounded(x, name) == 0)).sum()) / found.count
        below = found.share_below(name)
        assert below.least <= lost <= below.most
        if name != "nvfp4":
            assert below.is_exact
            scaled = block_rounded(x, name)
            # Clipped: as far from it as rounding does not bring it.
            off = (scaled.abs() - blocks.abs()) / blocks.abs()
            clipped = int((off < -(2.0 ** -(form.element.mantissa_bits + 2))).sum())
            assert found.share_above(name).least <= clipped / found.count
        assert int(found.maxima(form.block).sum()) == int((blocks.abs().amax(1) > 0).sum())


def test_clipped_by_mxfp8() -> None:
    # The first element's block reaches from 256 to 511; what is above 464 is clipped to 448.
    for first, is_clipped in ((256.0, False), (511.0, True)):
        found = fastcheck.exponents(torch.tensor([first] + [1.0] * 31))
        above = found.share_above("mxfp8")
        assert above == (Share(0, 1 / 32) if is_clipped else Share(0, 0))


def test_blocks_whose_scale_would_be_too_small() -> None:
    x = torch.full((64,), 2.0**-140)
    x[32:] = 1.0
    lost = int((block_rounded(x, "mxfp8_e4m3") == 0).sum())
    assert lost == 32  # 2^-140 over 2^-127 is below half of float8's smallest
    below = fastcheck.exponents(x).share_below("mxfp8_e4m3")
    assert below == Share(0.0, 0.5)


def test_more_than_64_binades() -> None:
    x = torch.exp2(torch.arange(-100, 20).float())
    found = fastcheck.exponents(x)
    assert found.elements.tolist() == [1] * 63 + [120 - 63]
    assert found.share_below("float16") == Share(76 / 120, 76 / 120)
    assert found.bottom == -100
    # The limit of bfloat16, 2^-134, lies in the last bin at this scale; then below all of it.
    assert found.share_below("bfloat16", 2.0**-40) == Share(0.0, 57 / 120)
    assert found.share_below("bfloat16", 2.0**-33) == Share(0.0, 0.0)


def test_readings_add_up() -> None:
    parts = [torch.randn(6400), torch.randn(64) * 1e6, torch.zeros(32), torch.randn(640) * 1e-25]
    whole = fastcheck.exponents(torch.cat(parts))
    for order in (parts, parts[::-1], [parts[2], *parts[:2], parts[3]]):
        counts = [fastcheck.exponents(part) for part in order]
        total = counts[0]
        for one in counts[1:]:
            total = total + one
        assert total == whole
    assert whole != counts[0] and whole.bottom == min(one.bottom for one in counts)
    assert whole.words is not counts[0].words


def test_what_has_no_elements() -> None:
    for x in (torch.empty(0), torch.zeros(5), torch.tensor([math.nan, math.inf])):
        found = fastcheck.exponents(x)
        assert (found.count, found.abs_max) == (0, 0.0)
        assert found.share_above("float16") == found.share_below("nvfp4") == Share(0.0, 0.0)


@pytest.mark.parametrize(
    ("format", "scale", "message"),
    [
        ("float17", 1.0, "did you mean|float16"),
        (16, 1.0, "not a name"),
        ("e4m3", 0.0, "above 0"),
        ("e4m3", math.inf, "above 0"),
        ("e4m3", True, "above 0"),
        ("mxfp8", 2.0, "scales of its own"),
    ],
)
def test_errors(format: str, scale: float, message: str) -> None:
    found = fastcheck.exponents(torch.ones(3))
    for method in (found.share_above, found.share_below):
        with pytest.raises(ConfigError, match=f"(?s){message}"):
            method(format, scale)


def test_other_errors() -> None:
    found = fastcheck.exponents(torch.ones(3))
    with pytest.raises(ConfigError, match="no fixed range"):
        found.share_subnormal("nvfp4")
    with pytest.raises(ConfigError, match="328 words"):
        Exponents(np.zeros(5, np.int64))


def test_aliases_and_text() -> None:
    found = fastcheck.exponents(torch.tensor([1.0, 2.0**-30]))
    for alias, name in (("fp16", "float16"), ("bf16", "bfloat16"), ("e5m2", "float8_e5m2")):
        assert found.share_below(alias) == found.share_below(name)
    assert str(found.share_below("fp16")) == "50 %"
    assert re.fullmatch(r"<Exponents: 2 of 2, to 2\*\*0>", repr(found))
    assert str(Share(0.0, 0.00001)) == "0 % to <0.01 %"
