"""What reads tensors on each kind of device: the table of backends."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Callable

import torch

from .._extension import extension, status
from .._record import DeviceMode
from . import portable

__all__ = ["Backend", "backend_for"]


@dataclass(frozen=True)
class Backend:
    """How the tensors of one kind of device are read.

    ``slots`` are uint8 (n, 192) on the tensors' device. Observing writes the value bytes [0, 112)
    of slots and no others, without synchronising unless the backend is immediate, and outside of
    autograd by itself. Tensors have to be readable: ``_readable.unreadable_reason`` is None.
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
    #: 0-dim float32 on the tensors' device: 1.0 where any of them holds a NaN or an infinity.
    found_nonfinite: Callable[[Sequence[torch.Tensor]], torch.Tensor]
    #: (tensor, logical): the dtype code and the order that the record will say. Host only.
    identity: Callable[[torch.Tensor, bool], tuple[int, int]]


def _cpu_observe(tensor: torch.Tensor, slots: torch.Tensor, index: int, depth: int) -> None:
    row = extension.record(tensor, depth)
    slots[index, : portable.VALUE_BYTES] = row[: portable.VALUE_BYTES]


def _cpu_observe_list(
    tensors: Sequence[torch.Tensor], slots: torch.Tensor, first: int, depth: int
) -> None:
    rows = extension.record_list(tensors, depth)
    slots[first : first + len(tensors), : portable.VALUE_BYTES] = rows[:, : portable.VALUE_BYTES]


#: Devices whose arithmetic is known to have infinities and NaN as IEEE 754 has them.
_IEEE = frozenset({"cpu", "cuda", "xpu", "mps"})


def _portable(device_type: str) -> Backend:
    return Backend(
        name="portable",
        is_immediate=device_type == "cpu",
        determinism="sums",
        device_mode=DeviceMode.IEEE if device_type in _IEEE else DeviceMode.UNKNOWN,
        has_host_flag=False,
        observe=portable.observe,
        observe_list=portable.observe_list,
        found_nonfinite=portable.found_nonfinite,
        identity=portable.identity,
    )


@functools.cache
def _of_type(device_type: str) -> Backend:
    if device_type == "cpu" and status.module is not None:
        return Backend(
            name="cpu",
            is_immediate=True,
            determinism="bitwise",
            device_mode=DeviceMode.IEEE,
            has_host_flag=False,
            observe=_cpu_observe,
            observe_list=_cpu_observe_list,
            found_nonfinite=extension.found_nonfinite,
            identity=portable.identity,
        )
    return _portable(device_type)


def backend_for(device: torch.device) -> Backend:
    """The backend that reads tensors on ``device``."""
    return _of_type(device.type)
