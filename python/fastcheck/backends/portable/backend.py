"""The portable backend: records from ATen operators, for devices without kernels and for machines
without the compiled extension.

Nothing here waits for the device or reads a value back. The first tensor of a device and a list of
new sizes copy a few constants there. Counts, extremes and checksum equal the CPU
kernel's bit for bit; the three sums are not in the canonical order (``docs/backends.md``).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fastcheck.backends.backend import Backend
from fastcheck.record.format import DeviceMode
from fastcheck.utils.torch.own_operators import no_grad

from .any_nonfinite import any_nonfinite
from .many import write_list_values
from .one import TEMPORARY_BYTES, write_values
from .traversal import traverse

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
    """Writes bytes [0, 112) of ``slots[index]``, uint8 (n, 192) on the tensor's
    device. The tensor is readable (``utils.torch.readable``). No synchronisation.
    """
    with no_grad(), _as_plain_tensors():
        x = traverse(tensor, logical)
        write_values(x, slots[index].view(torch.int64), tensor.numel(), depth, temporary_bytes)


def observe_list_logical(
    tensors: Sequence[torch.Tensor], slots: torch.Tensor, first: int, depth: int
) -> None:
    """:func:`observe_list` in row-major order, whatever the strides."""
    observe_list(tensors, slots, first, depth, logical=True)


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
    with no_grad(), _as_plain_tensors():
        rows = slots[first : first + len(tensors)].view(torch.int64)
        xs = [traverse(tensor, logical) for tensor in tensors]
        numels = [tensor.numel() for tensor in tensors]
        write_list_values(xs, numels, rows, depth, temporary_bytes)


#: Devices whose arithmetic is known to have infinities and NaN as IEEE 754 has them.
_IEEE = frozenset({"cpu", "cuda", "xpu", "mps"})


def portable_backend(device_type: str) -> Backend:
    """The backend of a type of device without kernels."""
    return Backend(
        name="portable",
        determinism="sums",
        device_mode=DeviceMode.IEEE if device_type in _IEEE else DeviceMode.UNKNOWN,
        observe=observe,
        observe_list=observe_list,
        found_nonfinite=any_nonfinite,
        observe_list_logical=observe_list_logical,
    )
