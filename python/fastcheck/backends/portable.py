"""Records in ATen operations from Python: for every device without a kernel of its own, and for
a machine without the compiled extension.

Nothing here waits for the device, reads a value back, or copies from the host once the constants
of a device and the sizes of a list have been seen. Counts, extremes and checksum equal the CPU
kernel's bit for bit; the three sums are not in the canonical order (``docs/backends.md``).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .._record import VALUE_BYTES
from .portable_formats import FORMATS
from .portable_found import found
from .portable_many import write_records
from .portable_one import TEMPORARY_BYTES, write_record
from .portable_traversal import order_of, traverse

__all__ = [
    "VALUE_BYTES",
    "found_nonfinite",
    "identity",
    "observe",
    "observe_list",
    "observe_list_logical",
]

# Past what a tensor subclass does on each operation. (no_grad: outside autograd.)
_as_plain_tensors = torch._C.DisableTorchFunctionSubclass


def observe(
    tensor: torch.Tensor,
    slots: torch.Tensor,
    index: int,
    depth: int,
    *,
    logical: bool = False,
    temporary_bytes: int = TEMPORARY_BYTES,
) -> None:
    """Launches what writes bytes [0, 112) of ``slots[index]``, uint8 (n, 192) on the tensor's
    device. The tensor is readable (``_readable.unreadable_reason``). No synchronisation.
    """
    with torch.no_grad(), _as_plain_tensors():
        x = traverse(tensor, logical)
        write_record(x, slots[index].view(torch.int64), tensor.numel(), depth, temporary_bytes)


def observe_list_logical(
    tensors: Sequence[torch.Tensor], slots: torch.Tensor, first: int, depth: int
) -> None:
    """:func:`observe_list` in row-major order, whatever the strides."""
    observe_list(tensors, slots, first, depth, logical=True)


def identity(tensor: torch.Tensor, logical: bool = False) -> tuple[int, int]:
    """The dtype code and the order that a record of ``tensor`` says. Host only."""
    return FORMATS[tensor.dtype].info.code, order_of(tensor, logical)


def observe_list(
    tensors: Sequence[torch.Tensor],
    slots: torch.Tensor,
    first: int,
    depth: int,
    *,
    logical: bool = False,
    temporary_bytes: int = TEMPORARY_BYTES,
) -> None:
    """Bytes [0, 112) of ``slots[first : first + len(tensors)]``, all tensors on their device.

    The launches depend on the dtypes and on the bytes, not on the number of tensors. A list whose
    sizes have not been seen copies an index to the device, without waiting for it.
    """
    if not tensors:
        return
    with torch.no_grad(), _as_plain_tensors():
        rows = slots[first : first + len(tensors)].view(torch.int64)
        xs = [traverse(tensor, logical) for tensor in tensors]
        numels = [tensor.numel() for tensor in tensors]
        write_records(xs, numels, rows, depth, temporary_bytes)


def found_nonfinite(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """float32, 0-dim, on the tensors' device (the CPU for none): 1.0 where any of them holds a NaN
    or an infinity. Integers can't. No synchronisation.
    """
    with torch.no_grad(), _as_plain_tensors():
        return found(tensors)
