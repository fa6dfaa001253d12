"""Tensors as the compiled kernels take them: pointers, dtype codes, sizes and strides."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fastcheck.record.format import DTYPES
from fastcheck.utils.torch.own_operators import no_grad
from fastcheck.utils.torch.readable import freed_reason

#: (address, dtype code, sizes, strides), of ``csrc/abi3/arguments.h``.
TensorArgument = tuple[int, int, tuple[int, ...], tuple[int, ...]]

_CODES = {getattr(torch, row.name): row.code for row in DTYPES if hasattr(torch, row.name)}


def arguments_of(
    tensors: Sequence[torch.Tensor],
) -> tuple[list[TensorArgument], list[torch.Tensor]]:
    """The arguments of readable tensors, and the tensors whose memory they are: keep them until the
    kernels are launched. Conjugate and negative views, which hold other bits than they show, are
    written out. ValueError for a tensor whose memory was freed.
    """
    with no_grad(), torch._C.DisableTorchFunctionSubclass():
        kept = [_resolved(tensor) for tensor in tensors]
        return [(x.data_ptr(), _CODES[x.dtype], x.shape, x.stride()) for x in kept], kept


def _resolved(tensor: torch.Tensor) -> torch.Tensor:
    reason = freed_reason(tensor)
    if reason is not None:
        raise ValueError(reason)
    if tensor.is_conj() or tensor.is_neg():
        return tensor.resolve_conj().resolve_neg()
    return tensor
