"""Backend: the functions that read the tensors of one kind of device, and
tensors as the compiled kernels take them: pointers, dtype codes, sizes and strides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Callable, Optional, Protocol

import torch

from fastcheck.record.format import DTYPES, DeviceMode
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


#: (tensor, slots, index, depth)
Observe = Callable[[torch.Tensor, torch.Tensor, int, int], None]


class ObserveList(Protocol):
    """Writes ``slots[first : first + len(tensors)]``; ``logical``: in row-major order, whatever the
    strides.
    """

    def __call__(
        self,
        tensors: Sequence[torch.Tensor],
        slots: torch.Tensor,
        first: int,
        depth: int,
        *,
        logical: bool = False,
    ) -> None: ...


@dataclass(frozen=True)
class OverflowStatus:
    """A status word of the device that any overflow sets, until it is cleared. Both functions run
    on the device's current stream, without synchronisation.
    """

    #: A tensor of one element on the device: its bits are zero while nothing has overflowed.
    read: Callable[[torch.device], torch.Tensor]
    clear: Callable[[torch.device], None]


@dataclass(frozen=True)
class BlackBox:
    """The first non-finite records of the last stretches of launches on a device, in memory of the
    host: what is left of them when the device is lost. Of both functions the argument is the
    device's index, and neither waits (the first call of ``begin`` allocates).
    """

    #: A stretch of launches begins; its number, above all earlier ones. 0: there is no box.
    begin: Callable[[int], int]
    #: Rows of ``record.format.BOX_DTYPE``, as bytes; of a row without a record ``stretch`` is 0.
    contents: Callable[[int], bytes]


@dataclass(frozen=True)
class Backend:
    """The functions that read the tensors of one kind of device, and what they guarantee.

    ``slots`` are uint8 (n, 192) on the tensors' device. Observing writes the value bytes [0, 112)
    of slots, without synchronising with a device (on the CPU the record is complete on return), and
    outside of autograd. The other bytes are left as they are, or become those of a record whose
    sequence number, step, site and call are zero. Tensors have to be readable:
    ``utils.torch.readable.unreadable_reason`` is None.
    """

    name: str
    #: "bitwise": every field equals the CPU's; "sums": all but the three sums, which are within
    #: 1e-6 of abs_sum (sum_sq: of itself).
    determinism: str
    device_mode: DeviceMode
    #: Writes slots[index].
    observe: Observe
    observe_list: ObserveList
    #: 0-dim float32 on the tensors' device: 1.0 where any of them holds a NaN or an infinity, or
    #: what a device that saturates leaves in the place of an infinity.
    found_nonfinite: Callable[[Sequence[torch.Tensor]], torch.Tensor]
    #: (tensor, logical) -> int64 (328,) on the tensor's device: its exponent counts, without
    #: synchronising, outside of autograd. The tensor is of floating-point components.
    #: None where ``portable.exponents`` counts them.
    exponents: Optional[Callable[[torch.Tensor, bool], torch.Tensor]] = None
    #: (tensors, logical) -> int64 (n,) on the tensors' device: the checksums that their records
    #: would have, without synchronising. None where they are read from records.
    checksums: Optional[Callable[[Sequence[torch.Tensor], bool], torch.Tensor]] = None
    #: (tensor, slots, index) -> int64 (328,): observe() at full depth, and exponents() of the same
    #: tensor, its memory read once. None where the two are called one after the other.
    observe_and_count: Optional[Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]] = None
    #: (tensors, slots, first, depth, gate=): observe_list, captured in a graph. Each replay reads
    #: and writes the same memory again, and needs nothing else but what belongs to the graph; it
    #: does neither where ``gate``, int32 of one element on the device, is 0. None: it can't be
    #: captured.
    capture_list: Optional[Callable[..., None]] = None
    #: None where the device has none, or where its values show every overflow.
    overflow_status: Optional[OverflowStatus] = None
    #: None where a device that is lost takes all its records along.
    black_box: Optional[BlackBox] = None
    #: Sets which calls of this thread end another thread's graph capture in failure (2: a query of
    #: an event does not), and returns what it was; negative where it failed.
    exchange_capture_mode: Optional[Callable[[int], int]] = None
    #: observe_list of up to 32 small tensors takes a launch for each of their dtypes, so that they
    #: may wait for each other.
    reads_lists_in_one_launch: bool = False
    #: ``observe`` for C++: a capsule with a DirectObserve (csrc/torch/read/direct.h). None where it
    #: is Python's.
    direct_observe: Optional[object] = None
