"""Relations of two tensors that differ: transposed, rows in another order, cast, quantised, a part
of the other. Each is proved by the elements.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Callable

import numpy as np
import torch

from fastcheck.utils.text.numbers import enumerated

#: Larger tensors are not looked at.
_MOST = 1 << 26
_ORDERS: Mapping[tuple[int, ...], str] = {
    (0, 2, 3, 1): "NCHW to NHWC",
    (0, 3, 1, 2): "NHWC to NCHW",
    (2, 3, 1, 0): "OIHW to HWIO",
    (3, 2, 0, 1): "HWIO to OIHW",
}
_CASTS = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)
#: Rounding to the nearest float8, relative to the element, and to the scale where it is subnormal.
_FLOAT8 = {torch.float8_e4m3fn: (2.0**-4, 2.0**-10), torch.float8_e5m2: (2.0**-3, 2.0**-17)}

Scales = Mapping[str, torch.Tensor]


def relation_of(mine: torch.Tensor, other: torch.Tensor, scales: Scales) -> str:
    """The relation of ``mine`` to ``other``, in words; "" where nothing is proved. ``scales``:
    float tensors beside ``mine``, by name.
    """
    if not 1 < mine.numel() <= _MOST or other.numel() > _MOST:
        return ""
    if mine.is_complex() or other.is_complex():
        return ""
    with torch.no_grad():
        if mine.dtype != other.dtype:
            return _of_other_dtype(mine, other, scales)
        return _of_same_dtype(mine, other)


def _of_same_dtype(mine: torch.Tensor, other: torch.Tensor) -> str:
    if mine.numel() != other.numel():
        return _part_text(mine, other)
    # The extremes of a permutation are equal, and cost one pass.
    if all(map(torch.equal, _bits(mine).aminmax(), _bits(other).aminmax())):
        if mine.shape != other.shape and _equal(mine.flatten(), other.flatten()):
            return "the same elements in another shape"
        if axes := _transposition(mine, other) or _reversal(mine, other):
            return axes
        for dim, what in ((0, "rows"), (1, "columns")):
            if mine.shape == other.shape and _is_permuted(mine, other, dim):
                return f"{what} in another order"
        if _equal(_sorted(mine), _sorted(other)):
            return "the same elements in another order"
    if mine.shape != other.shape:
        return ""
    return (
        _rounded(mine, other) or _scaled(mine, other) or constant_text(mine) or _half(mine, other)
    )


def _of_other_dtype(mine: torch.Tensor, other: torch.Tensor, scales: Scales) -> str:
    if mine.shape != other.shape:
        for cast, of in ((mine, other.to(mine.dtype)), (mine.to(other.dtype), other)):
            text = _of_same_dtype(cast, of) if _is_plain(mine) and _is_plain(other) else ""
            if text:
                return f"cast, and {text}"
        return ""
    if _equal(mine, other.to(mine.dtype)):
        return f"cast to {dtype_name(mine.dtype)}, nothing else"
    if _equal(mine.to(other.dtype), other):
        return f"reference is its cast to {dtype_name(other.dtype)}"
    if other.is_floating_point():
        for name, scale in scales.items():
            if _is_quantised(mine, other, scale):
                return f"quantised to {dtype_name(mine.dtype)} with the scale {name}"
    if _is_plain(mine) and _is_plain(other):
        # A cast to a coarser dtype and a permutation can change places.
        coarse = min(mine.dtype, other.dtype, key=lambda dtype: dtype.itemsize)
        text = _of_same_dtype(mine.to(coarse), other.to(coarse))
        return f"cast to {dtype_name(mine.dtype)}, and {text}" if text else ""
    return ""


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype.itemsize >= 2


def dtype_name(dtype: torch.dtype) -> str:
    """``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def constant_text(tensor: torch.Tensor) -> str:
    """The text on a tensor of equal elements; "" of others."""
    values = tensor.reshape(-1).float() if tensor.itemsize == 1 else tensor.reshape(-1)
    if not values.numel() or not bool((values == values[0]).all()):
        return ""
    return f"each element is {values[0].item()}" if values[0].item() else "all zeros"


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The elements as integers of the same size, so that NaN equals itself."""
    size = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(size[tensor.dtype.itemsize])


def _equal(mine: torch.Tensor, other: torch.Tensor) -> bool:
    return mine.shape == other.shape and torch.equal(_bits(mine), _bits(other))


def _sorted(tensor: torch.Tensor) -> torch.Tensor:
    return _bits(tensor).flatten().sort().values


def _transposition(mine: torch.Tensor, other: torch.Tensor) -> str:
    dims = mine.dim()
    if dims == 2:
        return "transposed" if _equal(mine, other.t()) else ""
    if not 3 <= dims <= 4 or other.dim() != dims:
        return ""
    # Orders that move few dimensions come first.
    orders = itertools.permutations(range(dims))
    for order in sorted(orders, key=lambda order: sum(a != b for a, b in enumerate(order))):
        if _equal(mine, other.permute(order)):
            moved = [place for place in range(dims) if order[place] != place]
            if len(moved) == 2:
                return f"transposed: dimensions {moved[0]} and {moved[1]}"
            known = _ORDERS.get(order)
            axes = f"dimensions {', '.join(map(str, order))} of reference"
            return f"transposed: {f'as {known}' if known else axes}"
    return ""


def _reversal(mine: torch.Tensor, other: torch.Tensor) -> str:
    dims = mine.dim()
    if not 3 <= dims <= 4 or mine.shape != other.shape:  # of two, rows or columns
        return ""
    for count in range(1, dims + 1):
        for axes in itertools.combinations(range(dims), count):
            if _equal(mine, other.flip(axes)):
                return f"reversed along {'dimension' if count == 1 else 'dimensions'} " + (
                    enumerated([str(axis) for axis in axes])
                )
    return ""


def _rows(tensor: torch.Tensor, dim: int) -> np.ndarray:
    """An item of bytes a row."""
    rows = (
        _bits(tensor.transpose(0, dim)).flatten(1) if tensor.dim() > 1 else _bits(tensor)[:, None]
    )
    data = np.ascontiguousarray(rows.numpy())
    return data.view(np.dtype((np.void, data.shape[1] * data.itemsize)))[:, 0]


def _is_permuted(mine: torch.Tensor, other: torch.Tensor, dim: int) -> bool:
    if mine.dim() < 2 or mine.shape[dim] < 2:
        return False
    one, two = (sorted(row.tobytes() for row in _rows(side, dim)) for side in (mine, other))
    return one == two


def _rounded(mine: torch.Tensor, other: torch.Tensor) -> str:
    if not mine.is_floating_point():
        return ""
    for dtype in _CASTS:
        if dtype.itemsize < mine.dtype.itemsize:
            for values, of, text in ((mine, other, "actual"), (other, mine, "reference")):
                # Any numbers near a constant such as 1, which norms begin with, are rounded to it.
                is_rounded = _equal(values, of.to(dtype).to(values.dtype))
                if is_rounded and not constant_text(values):
                    return f"{text} was rounded to {dtype_name(dtype)}"
    return ""


def _scaled(mine: torch.Tensor, other: torch.Tensor) -> str:
    """A description of a tensor that is the other times, or plus, a number."""
    if mine.dtype.itemsize < 2:
        return ""
    one, two = mine.double().flatten(), other.double().flatten()
    if not bool(torch.isfinite(one).all() and torch.isfinite(two).all()):
        return ""
    eps = torch.finfo(mine.dtype).eps if mine.is_floating_point() else 0.0
    place = int(two.abs().argmax())
    more, rounding = float(one[place] - two[place]), 2 * eps * float(one.abs().max())
    is_near = bool(((one - two - more).abs() <= rounding).all() and (two != two[0]).any())
    if is_near and abs(more) > 4 * rounding:
        return f"each element is {abs(more):.6g} {'more' if more > 0 else 'less'}"
    if not mine.is_floating_point() or not two[place] or not one[place]:
        return ""
    factor = float(one[place] / two[place])
    if not bool(((one - factor * two).abs() <= 2 * eps * one.abs()).all()):
        return ""
    text = f"{factor:.6g}"
    return {"-1": "negated", "1": ""}.get(text, f"multiplied by {text}")


def _half(mine: torch.Tensor, other: torch.Tensor) -> str:
    """A description of a tensor of which only a part was written."""
    one, two = _bits(mine).flatten(), _bits(other).flatten()
    differing = (one != two).nonzero()
    if not len(differing):
        return ""
    first, last = int(differing[0]), int(differing[-1])
    if first == last:
        return f"element {first:,} differs, the others are equal to the bit"
    if not one[first : last + 1].any():
        return f"elements {first:,} to {last:,} are zeros, the others are equal to the bit"
    if 2 * len(differing) >= len(one):
        return ""
    count = f"{len(differing):,} elements from {first:,} to {last:,}"
    return f"{count} differ, the others are equal to the bit"


def _is_quantised(mine: torch.Tensor, other: torch.Tensor, scale: torch.Tensor) -> bool:
    values, weights, steps = mine.double(), other.double(), scale.double()
    if mine.dim() == 2 and steps.dim() == 1 and steps.numel() == mine.shape[0] > 1:
        steps = steps[:, None]
    # One for all, or one a row, a column, ...
    shape = (1,) * (mine.dim() - steps.dim()) + tuple(steps.shape)
    if len(shape) != mine.dim() or any(n not in (1, of) for n, of in zip(shape, mine.shape)):
        return False
    if not steps.numel() or not bool(steps.abs().max() > 0):
        return False
    off = (values * steps - weights).abs()
    if mine.dtype in _FLOAT8:
        relative, smallest = _FLOAT8[mine.dtype]
        return bool((off <= 1.01 * (relative * weights.abs() + smallest * steps.abs())).all())
    return mine.dtype in (torch.int8, torch.uint8) and bool((off <= 0.51 * steps.abs()).all())


def _part_text(mine: torch.Tensor, other: torch.Tensor) -> str:
    for small, large, of in ((mine, other, "reference"), (other, mine, "actual")):
        if small.numel() < large.numel():
            place = part_of(small, large)
            if place:
                whole = "it is" if of == "reference" else "reference is"
                return f"{whole} {place} of {of}"
    return ""


def group_counts(sizes: Sequence[int], likely: int = 1) -> list[int]:
    """The numbers of groups in which parts of these sizes may follow each other in a whole: one
    after the other, within each rank, or each head. ``likely``: to try after 1.
    """
    common = math.gcd(*sizes) if sizes else 1
    counts = [count for count in range(1, common + 1) if common % count == 0]
    return sorted(counts, key=lambda count: count not in (1, likely))


def part_of(small: torch.Tensor, large: torch.Tensor) -> str:
    """The rows or columns of ``large`` that are ``small``, in words; "" where none are."""
    if small.dim() != large.dim() or small.dtype != large.dtype or not small.numel():
        return ""
    if small.is_complex():
        return ""
    for dim, what in ((0, "rows"), (1, "columns")):
        if dim >= small.dim() or small.shape[dim] > large.shape[dim]:
            continue
        others = [n for n in range(small.dim()) if n != dim]
        if any(small.shape[n] != large.shape[n] for n in others):
            continue
        first = _rows(small.narrow(dim, 0, 1), dim)[0].tobytes()
        count = small.shape[dim]
        for start, row in enumerate(_rows(large, dim)[: large.shape[dim] - count + 1]):
            if row.tobytes() == first and _equal(large.narrow(dim, start, count), small):
                return f"{what} {start:,} to {start + count - 1:,}"
    return ""


Loader = Callable[[], torch.Tensor]


def find_parts(
    wholes: Mapping[str, Loader], parts: Mapping[str, Loader]
) -> Iterator[tuple[str, str, str]]:
    """(the name of a part, the name of a whole, which rows or columns it is)."""
    loaded = {name: load() for name, load in parts.items()}
    for whole, load in wholes.items():
        large = load()
        if not 1 < large.numel() <= _MOST:
            continue
        for name, small in loaded.items():
            if 1 < small.numel() < large.numel():
                place = part_of(small, large)
                if place:
                    yield name, whole, place
