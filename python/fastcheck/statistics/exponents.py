"""The public function exponents()."""

from __future__ import annotations

import torch

from fastcheck.backends.exponents import exponent_words
from fastcheck.errors import UnsupportedTensorError, choice
from fastcheck.record.exponents import Exponents
from fastcheck.record.format import ORDERS, Order
from fastcheck.utils.torch.readable import check, not_a_tensor


def exponents(x: torch.Tensor, *, order: str = "storage") -> Exponents:
    """How many elements of a tensor are in each binade, read where the tensor lies: which share of
    them a narrower format would lose, at any scale.

    The same counts on every device. Where a kernel is compiled for the device it reads the tensor
    once; elsewhere torch's own operations do.

    Args:
        x: a tensor of any shape and strides, of a floating-point or complex dtype (float64/32/16,
            bfloat16, float8_e4m3fn, float8_e5m2, complex64/128).
        order: as of :func:`stats`; it decides which elements are a block.

    Returns:
        :class:`Exponents`: NumPy arrays, and the shares that formats lose. Synchronises with the
        tensor's device: 2,624 bytes are copied to the host.

    Raises:
        UnsupportedTensorError: x can't be read, or has an integer dtype or bool.
        ConfigError: an unknown order.
    """
    logical = ORDERS[choice("order", order, ORDERS)] == Order.LOGICAL
    if not isinstance(x, torch.Tensor):
        raise not_a_tensor(x)
    if not (x.is_floating_point() or x.is_complex()):
        raise UnsupportedTensorError(
            f"expected a floating-point or complex dtype, got {x.dtype}: integers have no exponents"
        )
    check(x)
    return Exponents(exponent_words(x, logical).cpu().numpy())
