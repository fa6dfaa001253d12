"""Which tensors the kernels can read. Inside a hook the others pass unobserved; asked for by name
they are an error.
"""

from __future__ import annotations

from typing import Optional

import torch

from ._record import DTYPES

__all__ = ["can_hold_nonfinite", "can_read", "without_bytes"]

_READABLE = frozenset(getattr(torch, row.name) for row in DTYPES if hasattr(torch, row.name))
_NONFINITE = frozenset(t for t in _READABLE if t.is_floating_point or t.is_complex)
_PLAIN_DISPATCH = torch.Tensor.__torch_dispatch__


def can_hold_nonfinite(tensor: torch.Tensor) -> bool:
    """Floating point or complex, of a dtype that has a kernel."""
    return tensor.dtype in _NONFINITE


def can_read(tensor: torch.Tensor) -> bool:
    """Ordinary memory of this machine: not sparse, nested, fake, meta, or wrapped by a functorch
    transform.
    """
    return (
        tensor.is_cpu
        and tensor.dtype in _READABLE
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and type(tensor).__torch_dispatch__ is _PLAIN_DISPATCH
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    )


def without_bytes(tensor: torch.Tensor) -> Optional[str]:
    """What ``tensor`` is, when it has no bytes of its own in row-major order; None when it has."""
    if tensor.is_nested:
        return "a nested tensor; give its values()"
    if tensor.layout is not torch.strided:
        return f"layout {tensor.layout}; give its values()"
    if tensor.is_quantized:
        return "a quantized tensor; give its int_repr()"
    if tensor.is_meta or type(tensor).__torch_dispatch__ is not _PLAIN_DISPATCH:
        kind = type(tensor).__name__
        return f"a {kind} without memory (meta, fake or wrapped); give the tensor inside"
    strides = zip(tensor.shape, tensor.stride())
    last = tensor.storage_offset() + sum((size - 1) * stride for size, stride in strides)
    needed = (last + 1) * tensor.element_size()
    held = tensor.untyped_storage().nbytes()
    if tensor.numel() and held < needed:
        return f"one that needs {needed} bytes over a storage of {held}; it was freed or resized"
    return None


def has_memory(tensor: torch.Tensor) -> bool:
    """False for what sharding leaves of a parameter between its uses: a shape over an empty
    storage.
    """
    return tensor.numel() == 0 or tensor.untyped_storage().nbytes() > 0
