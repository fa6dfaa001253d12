"""The portable backend's found_nonfinite: whether any tensor of a list holds NaN or Inf."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from fastcheck.backends.portable import backend as module
from fastcheck.backends.portable.backend import any_nonfinite
from support.helpers import tensor_of
from support.records.reference import DTYPES, FLOAT_NAMES, fields, record
from support.records.special_codes import special_codes


@pytest.mark.parametrize("dtype", FLOAT_NAMES)
def test_found_nonfinite(dtype: str) -> None:
    row = DTYPES[dtype]
    for code in special_codes(dtype):
        bits = np.zeros(6004, f"<u{row.itemsize}")
        bits[[0, 3000][code % 2]] = code
        x = tensor_of(bits.tobytes(), dtype)
        wanted = fields(record(x))["flags"] & 1
        strided = torch.cat((x, x[:1])).as_strided((2, x.numel() // 2), (1, 2))
        for xs in ([x], [torch.ones(3), x], [x.view(2, -1).t(), torch.empty(0)], [strided]):
            found = any_nonfinite(xs)
            assert (found.dtype, found.shape) == (torch.float32, ())
            assert float(found) == wanted, (hex(code), len(xs))


def test_found_nonfinite_in_lists() -> None:
    top = [
        torch.full((9000,), torch.finfo(d).max, dtype=d)
        for d in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    ]
    ints = [torch.arange(5), torch.ones(3, dtype=torch.bool)]
    assert float(any_nonfinite([])) == 0.0
    assert float(any_nonfinite(ints)) == 0.0
    assert float(any_nonfinite(top + ints)) == 0.0  # the largest are finite
    for place, bad in itertools.product(range(4), (math.nan, math.inf, -math.inf)):
        xs = [x.clone() for x in top]
        xs[place][8999] = bad
        assert float(any_nonfinite(xs)) == 1.0
        assert float(any_nonfinite([xs[place], *top])) == 1.0
    lazy = torch.tensor([1 + 2j, complex(3, math.inf)]).conj()
    assert float(any_nonfinite([lazy])) == 1.0
    assert float(any_nonfinite([lazy[:1], lazy[:1].imag])) == 0.0


def test_float8_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FLOAT8_CHUNK", 7)
    x = torch.zeros(5, 9, dtype=torch.float8_e5m2)
    assert float(any_nonfinite([x, x.t()])) == 0.0
    for place in range(45):
        y = x.clone()
        y.view(torch.uint8).view(-1)[place] = 0x7C
        assert float(any_nonfinite([y])) == float(any_nonfinite([y.t()])) == 1
