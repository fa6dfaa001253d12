"""Errors of fastcheck.stats, checksum, crc32 and found_nonfinite for unreadable tensors."""

from __future__ import annotations

from typing import Any, Callable

import numpy as np
import pytest
import torch

import fastcheck
from fastcheck import UnsupportedTensorError
from fastcheck.statistics.functions import crc32
from support.helpers import DEVICE, ON_CPU, put
from support.records.reference import DTYPES
from support.records.unreadable import UNREADABLE, quiet

pytestmark = pytest.mark.fake_statistics


OPS = torch.ops.fastcheck
X = put(torch.tensor([1.0, -2.0, 0.0, float("nan"), float("inf"), 4.0]))


UNSUPPORTED = ["float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "complex32"]


@pytest.mark.parametrize("case", sorted(UNREADABLE))
@pytest.mark.parametrize(
    "function", ["stats", "stats_list", "checksum", "crc32", "found_nonfinite"]
)
def test_unreadable_tensors(function: str, case: str) -> None:
    if ON_CPU and (function, case) == ("found_nonfinite", "fake"):
        pytest.skip("an op that traces: test_ops_on_fake_and_meta_tensors_give_shapes")
    make, message = UNREADABLE[case]
    x = quiet(make)
    call: Callable[[], object] = {
        "stats": lambda: fastcheck.stats(x),
        "stats_list": lambda: fastcheck.stats([X, x]),
        "checksum": lambda: fastcheck.checksum(x),
        "crc32": lambda: crc32(x),
        "found_nonfinite": lambda: fastcheck.found_nonfinite([X, x]),
    }[function]
    with pytest.raises(UnsupportedTensorError, match=message) as error:
        call()
    assert "expected" in str(error.value)
    assert len(str(error.value)) < 1000  # not the dispatcher's table
    assert not isinstance(error.value, RuntimeError)
    if function == "stats_list":
        assert "item 1" in str(error.value)


@pytest.mark.parametrize("dtype", UNSUPPORTED)
def test_unsupported_dtypes_name_the_supported_ones(dtype: str) -> None:
    x = quiet(lambda: torch.empty(3, dtype=getattr(torch, dtype), device=DEVICE))
    for call in (fastcheck.stats, fastcheck.checksum, fastcheck.found_nonfinite):
        with pytest.raises(UnsupportedTensorError) as error:
            call(x)
        for name in DTYPES:
            assert name in str(error.value)
    crc = crc32(torch.ones(4, dtype=torch.uint8).view(torch.bfloat16))  # bytes are bytes
    assert crc == crc32(torch.ones(4, dtype=torch.uint8))


@pytest.mark.parametrize("got", [3, None, "x", [1.0], np.ones(3), [[torch.ones(3)]], {"a": X}])
def test_what_is_no_tensor(got: Any) -> None:
    for call in (fastcheck.stats, fastcheck.checksum, crc32, fastcheck.found_nonfinite):
        with pytest.raises(UnsupportedTensorError, match="expected"):
            call(got)


def test_one_tensor_is_wanted() -> None:
    for call in (fastcheck.checksum, crc32):
        with pytest.raises(UnsupportedTensorError, match=r"expected a torch\.Tensor"):
            call([X])  # type: ignore[arg-type]  # wrong on purpose


@pytest.mark.parametrize("got", ["ful", "", "FULL", None, 3, ["full"]])
def test_wrong_record(got: Any) -> None:
    with pytest.raises(
        fastcheck.ConfigError, match=r'(?s)record.*"health" or "stats" or "full"'
    ) as error:
        fastcheck.stats(X, record=got)
    assert repr(got) in str(error.value)


@pytest.mark.parametrize("got", ["memory", "", "Storage", None, 0, ["storage"]])
def test_wrong_order(got: Any) -> None:
    for call in (fastcheck.stats, fastcheck.checksum):
        with pytest.raises(
            fastcheck.ConfigError, match=r'(?s)order.*"storage" or "logical"'
        ) as error:
            call(X, order=got)
        assert repr(got) in str(error.value)


def test_near_names_are_offered() -> None:
    with pytest.raises(fastcheck.ConfigError, match="did you mean 'full'"):
        fastcheck.stats(X, record="ful")
    with pytest.raises(fastcheck.ConfigError, match="did you mean 'logical'"):
        fastcheck.stats(X, order="logic")


def test_options_are_keyword_only() -> None:
    with pytest.raises(TypeError):
        fastcheck.stats(X, "full")  # type: ignore[call-overload]  # wrong on purpose


def test_the_ops_own_checks() -> None:
    with pytest.raises(ValueError, match="depth 1"):
        OPS.stats(X, 7)
    slots = torch.zeros(2, 192, dtype=torch.uint8, device=DEVICE)
    for bad, index in ((slots, 2), (slots, -1), (slots.float(), 0), (slots.t(), 0)):
        with pytest.raises((IndexError, ValueError), match="expected slots"):
            OPS.observe_(X, bad, index, 3, 0, 0, 0, 0, 0)
    assert not slots.any()
    with pytest.raises(TypeError, match="supported dtypes"):
        OPS.stats(quiet(lambda: torch.empty(3, dtype=torch.complex32, device=DEVICE)))


@pytest.mark.skipif(ON_CPU, reason="two devices")
def test_the_ops_want_one_device() -> None:
    here = torch.ones(3)
    for op in (OPS.stats_list, OPS.found_nonfinite):
        for xs in ([X, here], [here, X]):
            with pytest.raises(TypeError, match=r"item 1: expected a .*tensor"):
                op(xs)
    slots = torch.zeros(2, 192, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"expected slots in .* got torch\.uint8 on cpu"):
        OPS.observe_(X, slots, 0, 3, 0, 0, 0, 0, 0)


def test_errors_leave_things_as_they_were() -> None:
    x = X.clone()
    with pytest.raises(UnsupportedTensorError):
        fastcheck.stats([x, torch.ones(3, device="meta")])
    assert fastcheck.stats(x) == fastcheck.stats(X)
    assert x._version == 0


@pytest.mark.parametrize("x", [[1, 2], np.ones(2), "x", None, torch.nn.Linear(2, 2)])
def test_what_is_no_tensor_is_told_how_to_become_one(x: Any) -> None:
    for call in (fastcheck.stats, fastcheck.checksum, fastcheck.exponents):
        with pytest.raises(UnsupportedTensorError, match=r"expected a .*; give torch\.as_tensor"):
            call(x)
