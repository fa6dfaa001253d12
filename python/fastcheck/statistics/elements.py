"""Distance of two tensors, element by element, in chunks of bounded memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Optional

import torch

_CHUNK = 1 << 20

#: The integer type that shows a format's bits.
_BITS = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
}
for _name in ("float8_e4m3fn", "float8_e5m2"):
    _dtype = getattr(torch, _name, None)
    if _dtype is not None:
        _BITS[_dtype] = torch.int8


@dataclass(frozen=True)
class Elements:
    """Measures over the elements that are finite on both sides, ``a`` the actual values, ``b`` the
    reference:

    cosine          a.b / (||a|| ||b||); 1 for two tensors of zeros
    max_abs         max |a - b|
    max_rel         max |a - b| / |b|, with |b| at least the smallest normal number of the format
    within_1000     share with |a - b| <= |b| / 1000; within_200: / 200, that is 5/1000
    euclidean       ||a - b||
    distance        ||a - b|| / ||b||
    largest         max |a - b| / max |b|
    max_ulp         most representable numbers from a to b, in the coarser format; None: integers
    nonfinite       elements that are NaN, +Inf or -Inf on one side and something else on the other
    differing       elements that are not equal (two NaN are)
    first           index of the first of them, row-major; None when there is none
    """

    cosine: float
    max_abs: float
    max_rel: float
    within_1000: float
    within_200: float
    euclidean: float
    distance: float
    largest: float
    max_ulp: Optional[int]
    nonfinite: int
    differing: int
    first: Optional[int]


def compare_elements(actual: torch.Tensor, reference: torch.Tensor) -> Elements:
    """Two tensors of equal shape. Reads them once, on the host."""
    formats = (actual.dtype, reference.dtype)
    narrow = _narrower(*formats)
    tiny = torch.finfo(narrow).tiny if narrow is not None else 1.0
    dot = squares_a = squares_b = squares_d = 0.0
    max_abs = max_rel = max_b = 0.0
    within_1000 = within_200 = finite = nonfinite = differing = 0
    max_ulp = 0
    first: Optional[int] = None
    start = 0
    for part_a, part_b in zip(_parts(actual), _parts(reference)):
        a, b = _wide(part_a), _wide(part_b)
        # Not by float64 where it can be helped: it rounds large integers together.
        exact = part_a == part_b if part_a.dtype == part_b.dtype and narrow is None else a == b
        equal = exact | (a.isnan() & b.isnan())
        unequal = int((~equal).sum())
        if unequal and first is None:
            first = start + int((~equal).to(torch.uint8).argmax())
        differing += unequal
        start += len(a)
        usable = a.isfinite() & b.isfinite()
        nonfinite += int((~usable & ~equal).sum())
        if not bool(usable.all()):
            a, b = a[usable], b[usable]
            part_a, part_b = part_a[usable], part_b[usable]
        if not len(a):
            continue
        finite += len(a)
        apart, size = (a - b).abs(), b.abs()
        dot += float(a @ b)
        squares_a += float(a @ a)
        squares_b += float(b @ b)
        squares_d += float(apart @ apart)
        max_abs = max(max_abs, float(apart.max()))
        max_b = max(max_b, float(size.max()))
        max_rel = max(max_rel, float((apart / size.clamp(min=tiny)).max()))
        within_1000 += int((apart <= size / 1000).sum())
        within_200 += int((apart <= size / 200).sum())
        if narrow is not None:
            max_ulp = max(max_ulp, _ulp(part_a.to(narrow), part_b.to(narrow)))
    norms = math.sqrt(squares_a) * math.sqrt(squares_b)
    lone = 1.0 if squares_a == squares_b == 0 else 0.0
    euclidean = math.sqrt(squares_d)
    return Elements(
        cosine=min(dot / norms, 1.0) if norms > 0 else lone,
        max_abs=max_abs,
        max_rel=max_rel,
        within_1000=within_1000 / finite if finite else 1.0,
        within_200=within_200 / finite if finite else 1.0,
        euclidean=euclidean,
        distance=_over(euclidean, math.sqrt(squares_b)),
        largest=_over(max_abs, max_b),
        max_ulp=max_ulp if narrow is not None else None,
        nonfinite=nonfinite,
        differing=differing,
        first=first,
    )


def _parts(x: torch.Tensor) -> Iterator[torch.Tensor]:
    """Row-major pieces of real numbers, one-dimensional, on the host; complex numbers as pairs."""
    x = x.detach()
    if x.is_complex():
        x = torch.view_as_real(x.resolve_conj())
    # Not contiguous: a copy, of the size of the tensor. A view of a mapped file stays a view.
    flat = x.resolve_neg().reshape(-1)
    return (flat[i : i + _CHUNK].cpu() for i in range(0, max(flat.numel(), 1), _CHUNK))


def _wide(x: torch.Tensor) -> torch.Tensor:
    """float64 holds every other format but the ends of int64 and uint64."""
    if x.dtype in (torch.uint8, torch.bool) or x.dtype not in _BITS or x.element_size() > 1:
        return x.to(torch.float64)
    return x.to(torch.float32).to(torch.float64)


def _narrower(left: torch.dtype, right: torch.dtype) -> Optional[torch.dtype]:
    """The coarser of two real float formats; of complex formats that of their parts."""
    parts = {torch.complex64: torch.float32, torch.complex128: torch.float64}
    left, right = parts.get(left, left), parts.get(right, right)
    if left not in _BITS or right not in _BITS:
        return None
    return left if torch.finfo(left).eps >= torch.finfo(right).eps else right


def _ulp(a: torch.Tensor, b: torch.Tensor) -> int:
    """The most representable numbers that lie between: bits as integers that are ordered as the
    numbers are, both zeros in one place.
    """
    bits = _BITS[a.dtype]
    width = torch.iinfo(bits).bits
    lowest = torch.iinfo(bits).min

    def place(x: torch.Tensor) -> torch.Tensor:
        raw = x.contiguous().view(bits).to(torch.int64)
        return torch.where(raw < 0, lowest - raw, raw)

    first, other = place(a), place(b)
    if width == 64:
        # The distance of opposite signs may not fit: half of each side does.
        far = (first // 2 - other // 2).abs()
        if int(far.max()) >= 2**61:
            return 2 * int(far.max())
    return int((first - other).abs().max())


def _over(part: float, whole: float) -> float:
    if part == 0:
        return 0.0
    return part / whole if whole > 0 else math.inf
