"""found_nonfinite() in torch operators: one word on the device for many tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from fastcheck.utils.torch.own_operators import no_grad

from .formats import FORMATS

#: float8 has no norm: this many elements at a time are widened to float16, exactly.
_FLOAT8_CHUNK = 3 * 1024 * 1024


def any_nonfinite(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """1.0 where any of the tensors holds a NaN or an infinity, else 0.0: float32, 0-dim, on the
    tensors' device (on the CPU for an empty list). Integer tensors are skipped. No synchronisation.
    """
    # Outside of autograd and of tensor subclasses.
    with no_grad(), torch._C.DisableTorchFunctionSubclass():
        return _any_nonfinite(tensors)


def _any_nonfinite(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The largest magnitude of a tensor is exact in its own dtype, and is a NaN or an infinity
    exactly when the tensor holds one: one list operation for each dtype.
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
