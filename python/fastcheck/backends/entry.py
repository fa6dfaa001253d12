"""One entry of the table of backends: how the tensors of one kind of device are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Callable, Optional

import torch

from .._record import DeviceMode

__all__ = ["Backend", "OverflowStatus"]


@dataclass(frozen=True)
class OverflowStatus:
    """A word of the device's own that any overflow on it sets, and that stays set. Both functions
    are put on the device's current stream, and wait for nothing.
    """

    #: A tensor of one element on the device: its bits are zero while nothing has overflowed.
    read: Callable[[torch.device], torch.Tensor]
    clear: Callable[[torch.device], None]


@dataclass(frozen=True)
class Backend:
    """How the tensors of one kind of device are read.

    ``slots`` are uint8 (n, 192) on the tensors' device. Observing writes the value bytes [0, 112)
    of slots, without synchronising unless the backend is immediate, and outside of autograd by
    itself. It leaves the other bytes, or makes them those of a whole record that knows no sequence
    number, step, site or call. Tensors have to be readable: ``_readable.unreadable_reason`` is
    None.
    """

    name: str
    #: Records are on the host when observe returns.
    is_immediate: bool
    #: "bitwise": every field equals the CPU's; "sums": all but the three sums, which are within
    #: 1e-6 of abs_sum (sum_sq: of itself).
    determinism: str
    device_mode: DeviceMode
    #: The kernel can raise a flag in the host's memory.
    has_host_flag: bool
    #: (tensor, slots, index, depth)
    observe: Callable[[torch.Tensor, torch.Tensor, int, int], None]
    #: (tensors, slots, first, depth): slots[first : first + len(tensors)]
    observe_list: Callable[[Sequence[torch.Tensor], torch.Tensor, int, int], None]
    #: 0-dim float32 on the tensors' device: 1.0 where any of them holds a NaN or an infinity, or
    #: what a device that saturates leaves in the place of one.
    found_nonfinite: Callable[[Sequence[torch.Tensor]], torch.Tensor]
    #: (tensor, logical): the dtype code and the order that the record will say. Host only.
    identity: Callable[[torch.Tensor, bool], tuple[int, int]]
    #: observe_list in row-major order, whatever the strides.
    observe_list_logical: Callable[[Sequence[torch.Tensor], torch.Tensor, int, int], None]
    #: observe and observe_list may be captured in a graph: at each replay they read and write the
    #: same memory again, and need nothing else but what belongs to the graph.
    is_capturable: bool = False
    #: None where the device has none, or where its values show every overflow.
    overflow_status: Optional[OverflowStatus] = None
