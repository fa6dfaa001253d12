"""The portable backend: records from ATen operators, for devices without kernels and for machines
without the compiled extension.

Nothing here waits for the device or reads a value back. The first tensor of a device and a list of
new sizes copy a few constants there. Counts, extremes and checksum equal the CPU
kernel's bit for bit; the three sums are not in the canonical order (``docs/backends.md``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from fastcheck.backends.backend import Backend
from fastcheck.record.format import DeviceMode
from fastcheck.utils.torch.own_operators import no_grad, unobserved

from .formats import FORMATS
from .many import write_list_values
from .one import TEMPORARY_BYTES, write_values
from .traversal import traverse

# Past what a tensor subclass does on each operation. (no_grad: outside autograd. unobserved: a dump
# beside a monitor has the program's operators alone.)
_as_plain_tensors = torch._C.DisableTorchFunctionSubclass

#: float8 has no norm: this many elements at a time are widened to float16, exactly.
_FLOAT8_CHUNK = 3 * 1024 * 1024


def any_nonfinite(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """1.0 where any of the tensors holds a NaN or an infinity, else 0.0: float32, 0-dim, on the
    tensors' device (on the CPU for an empty list). Integer tensors are skipped. No synchronisation.
    """
    with no_grad(), unobserved(), _as_plain_tensors():
        return _any_nonfinite(tensors)


def _any_nonfinite(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The largest magnitude of a tensor is exact in its own dtype, and is a NaN or an infinity
    exactly when the tensor holds such a number: one list operation for each dtype.
    """
    device = tensors[0].device if tensors else torch.device("cpu")
    groups: dict[torch.dtype, list[torch.Tensor]] = {}
    largest: list[torch.Tensor] = []
    for tensor in tensors:
        form = FORMATS[tensor.dtype]
        if not form.is_float or tensor.numel() == 0:
            continue
        x = tensor.detach()
        if form.info.components == 2:
            # Neither of the lazy views changes what is finite; only conj hides the parts.
            x = torch.view_as_real(x.conj() if x.is_conj() else x)
        if form.info.component_bytes == 1:
            for part in _widened(x):
                largest += torch._foreach_norm([part], float("inf"))
        else:
            groups.setdefault(form.dtype, []).append(x)
    for group in groups.values():
        largest += torch._foreach_norm(group, float("inf"))
    if not largest:
        return torch.zeros((), dtype=torch.float32, device=device)
    worst = torch.stack(largest).amax() if len(largest) > 1 else largest[0]
    # x - x is 0 for what is finite, else NaN, which differs from 0.
    return worst.sub(worst).ne_(0).to(torch.float32)


def _widened(x: torch.Tensor) -> Iterator[torch.Tensor]:
    if x.numel() <= _FLOAT8_CHUNK:
        yield x.to(torch.float16)
        return
    rows = _FLOAT8_CHUNK * x.shape[0] // x.numel()
    for part in torch.split(x, rows) if rows else x.unbind(0):
        yield from _widened(part)


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
    with no_grad(), unobserved(), _as_plain_tensors():
        x = traverse(tensor, logical)
        write_values(x, slots[index].view(torch.int64), tensor.numel(), depth, temporary_bytes)


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
    with no_grad(), unobserved(), _as_plain_tensors():
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
    )
