"""The exponent counts of a tensor (``docs/record-format.md``, section 10), in ATen operations on
its device.

Integers throughout, so that the counts are those of the CPU's kernel whatever the device rounds or
flushes. Nothing comes to the host.
"""

from __future__ import annotations

import torch

from fastcheck.utils.torch.own_operators import no_grad

from .constants import constant, counting
from .formats import MANTISSA_BITS, TILE, Format
from .one import TEMPORARY_BYTES, usable
from .traversal import traverse

BINS = 64
# Words of the header.
_HEADER = 8
# Temporary bytes per component: two exponents and a magnitude, masks, and indices of 8 bytes.
_COST = 64
_BLOCKS = (32, 16)


class _Layout:
    """A format's binades: bin 0 is that of the smallest subnormal."""

    def __init__(self, form: Format) -> None:
        width = 8 * form.info.component_bytes
        self.magnitude = (1 << (width - 1)) - 1
        self.mantissa_bits = MANTISSA_BITS[form.info.name]
        exponent_bits = width - 1 - self.mantissa_bits
        self.bias = (1 << (exponent_bits - 1)) - 1
        self.lowest = 1 - self.bias - self.mantissa_bits
        self.binades = 2 * self.bias + self.mantissa_bits + 2
        self.least_normal = 1 << self.mantissa_bits
        # Wide enough for the magnitude, and a float that holds a subnormal's digits exactly.
        is_wide = width == 64
        self.bits = torch.int64 if is_wide else torch.int32
        self.digits = torch.float64 if is_wide else torch.float32
        self.digit_bits, self.digit_bias = (52, 1023) if is_wide else (23, 127)


def count_exponents(
    tensor: torch.Tensor, logical: bool = False, temporary_bytes: int = TEMPORARY_BYTES
) -> torch.Tensor:
    """int64 (328,) on the tensor's device. The tensor is readable, of floating-point components."""
    with no_grad(), torch._C.DisableTorchFunctionSubclass():
        x = traverse(tensor, logical)
        layout = _Layout(x.format)
        totals = _Totals(layout, tensor.device)
        size = max(1, usable(temporary_bytes) // (_COST * TILE)) * TILE
        for _, padded in x.chunks(size, unit=_BLOCKS[0]):
            totals.add(padded.to(layout.bits), x.format.largest)
        return totals.words(x.components)


class _Totals:
    """The counts before the cut to 64 bins. The last bin of an array takes what is not counted."""

    def __init__(self, layout: _Layout, device: torch.device) -> None:
        self._layout = layout
        self._device = device
        self._nonfinite = self._new(1)
        self._largest = self._new(1)
        self._elements = self._new(layout.binades + 1)
        self._maxima = [self._new(layout.binades + 1) for _ in _BLOCKS]
        self._below = [self._new(BINS + 1) for _ in _BLOCKS]

    def _new(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.int64, device=self._device)

    def add(self, bits: torch.Tensor, largest_finite: int) -> None:
        """Adds a chunk of whole blocks; padding is zero."""
        layout = self._layout
        magnitude = bits.bitwise_and(layout.magnitude)
        is_finite = magnitude.le(largest_finite)
        self._nonfinite += is_finite.logical_not().sum()
        magnitude = magnitude.mul_(is_finite)
        self._largest = torch.maximum(self._largest, magnitude.amax().to(torch.int64))
        up = self._place(magnitude, is_up=True)
        _count(self._elements, up, magnitude)
        for i, block in enumerate(_BLOCKS):
            maximum = magnitude.view(-1, block).amax(1)
            down = self._place(maximum, is_up=False)
            _count(self._maxima[i], down, maximum)
            far = down.unsqueeze(1).add(1).sub(up.view(-1, block)).clamp_(max=BINS - 1)
            _count(self._below[i], far.view(-1), magnitude)

    def _place(self, magnitude: torch.Tensor, is_up: bool) -> torch.Tensor:
        """The bin of each magnitude, of its logarithm rounded down or up; anything for zeros."""
        layout = self._layout
        is_normal = magnitude.ge(layout.least_normal)
        field = magnitude.bitwise_right_shift(layout.mantissa_bits)
        digits = magnitude.to(layout.digits).view(layout.bits)
        first = digits.bitwise_right_shift(layout.digit_bits).sub_(layout.digit_bias)
        place = torch.where(is_normal, field.add_(layout.mantissa_bits - 1), first)
        if is_up:
            normal_rest = magnitude.bitwise_and(layout.least_normal - 1)
            rest = torch.where(is_normal, normal_rest, magnitude.bitwise_and(magnitude - 1))
            place += rest.ne(0)
        return place

    def words(self, components: int) -> torch.Tensor:
        """The words of the counts, of so many components."""
        layout = self._layout
        largest = self._largest.to(layout.bits)
        is_any = self._largest.ne(0)
        tops = [self._place(largest, is_up).to(torch.int64) for is_up in (True, False)]
        header = self._new(_HEADER)
        header[0] = components
        header[1] = self._nonfinite[0]
        header[2] = components - self._nonfinite[0] - self._elements[:-1].sum()
        for word, top in zip((3, 4), tops):
            header[word] = ((top + layout.lowest) * is_any)[0]
        lowest = self._elements[:-1].ne(0).to(torch.int32).argmax()
        header[6] = (lowest + layout.lowest) * is_any[0]
        header[5] = self._abs_max(tops[1])[0]
        parts = [_window(self._elements, tops[0])]
        parts += [_window(bins, tops[1]) for bins in self._maxima]
        return torch.cat([header, *parts, *(bins[:BINS] for bins in self._below)])

    def _abs_max(self, place: torch.Tensor) -> torch.Tensor:
        """The bits of the largest magnitude as a float64; ``place``: its bin."""
        layout, largest = self._layout, self._largest
        if layout.digits == torch.float64:
            return largest
        # The first digit is not stored; that of a subnormal has the place of its bin.
        digit = place.clamp(max=layout.mantissa_bits).clamp_(min=0)
        first = torch.ones_like(largest).bitwise_left_shift(digit)
        rest = largest.bitwise_and(first - 1).bitwise_left_shift(52 - digit)
        field = (place + layout.lowest + 1023).bitwise_left_shift(52)
        return (field + rest) * largest.ne(0)


def _count(bins: torch.Tensor, places: torch.Tensor, counted: torch.Tensor) -> None:
    """Adds 1 to the bins of those whose ``counted`` is not 0; the others go to the last bin."""
    last = constant(bins.numel() - 1, places.dtype, places.device)
    index = torch.where(counted.ne(0), places, last).to(torch.int64)
    bins.scatter_add_(0, index, constant(1, torch.int64, bins.device).expand(index.shape))


def _window(bins: torch.Tensor, top: torch.Tensor) -> torch.Tensor:
    """The 63 bins from ``top`` downwards, and the rest."""
    places = top - counting(BINS - 1, torch.int64, bins.device)
    counts = bins.gather(0, places.clamp(min=0)) * places.ge(0)
    return torch.cat([counts, bins[:-1].sum().sub(counts.sum()).view(1)])
