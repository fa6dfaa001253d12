"""HookReader: one call for a hook's tensor. Checks that the tensor can be read and is new and, on
the CPU, writes its record. In the extension (csrc/torch/hooks/reader.h), or in Python without it.
"""

from __future__ import annotations

from typing import Callable, Protocol

import torch

from fastcheck.backends.portable.traversal import dtype_and_order
from fastcheck.extension import compiled
from fastcheck.utils.torch.readable import can_hold_nonfinite, can_read
from fastcheck.utils.torch.seen_tensors import SeenTensors

from .host import HostRing

#: read() returns them for a tensor that can't be read, and for one of a type of device that was not
#: added.
UNREAD, UNKNOWN_DEVICE = -1, -2
#: Bits of read()'s result for other tensors.
IS_NEW, IS_BAD, ELSEWHERE, NEEDS_GRADIENT, NEW_STREAM = 1, 2, 4, 8, 16
_DTYPE_SHIFT, _ORDER_SHIFT = 5, 10
#: The bits above them: the sequence number under which the tensor is remembered.
TOKEN_SHIFT = 11
#: The token of a tensor that could not be read; larger than any sequence number.
NO_TOKEN = 2**50


def identity_of(code: int) -> tuple[int, int]:
    """The dtype code and the order of the record of a tensor ELSEWHERE."""
    return (code >> _DTYPE_SHIFT) & 31, (code >> _ORDER_SHIFT) & 1


class HookReader(Protocol):
    """Not thread-safe: the caller holds the session's lock."""

    def read(
        self,
        tensor: torch.Tensor,
        index: int,
        site: int,
        call: int,
        step: int,
        seq: int,
        flags: int,
        any_dtype: bool,
        /,
    ) -> int:
        """UNREAD, UNKNOWN_DEVICE, or bits and a token, as above. ``index``: the slot that a record
        goes to. ``any_dtype``: integers are read too. Raises the kernel's error for a tensor that
        it refuses, which is remembered by then. Does not synchronise.
        """

    def add_device(self, tensor: torch.Tensor, /) -> None:
        """Tensors on this tensor's type of device can be read from now on. The CPU needs no
        call.
        """


def make_reader(seen: SeenTensors, ring: HostRing) -> HookReader:
    """A reader that remembers tensors in ``seen`` and writes records to slots of ``ring``."""
    module = compiled()
    if module is None:
        return PythonReader(seen, ring.write)
    reader: HookReader = module.hook_reader(seen, ring.slots, ring.depth)
    return reader


class PythonReader:
    """HookReader in Python. Sets NEW_STREAM for every tensor on a device."""

    def __init__(self, seen: SeenTensors, write: Callable[..., bool]) -> None:
        self._seen = seen
        self._write = write
        self._known = {"cpu"}

    def read(
        self,
        tensor: torch.Tensor,
        index: int,
        site: int,
        call: int,
        step: int,
        seq: int,
        flags: int,
        any_dtype: bool,
        /,
    ) -> int:
        if not (any_dtype or can_hold_nonfinite(tensor)):
            return UNREAD
        if tensor.device.type not in self._known:
            return UNKNOWN_DEVICE
        if not can_read(tensor):
            return UNREAD
        token = self._seen.add(tensor, seq)
        if token == NO_TOKEN:
            return UNREAD
        if token >= 0:
            return token << TOKEN_SHIFT
        code = seq << TOKEN_SHIFT | IS_NEW
        if tensor.requires_grad:
            code |= NEEDS_GRADIENT
        if not tensor.is_cpu:
            dtype, order = dtype_and_order(tensor)
            return code | ELSEWHERE | NEW_STREAM | dtype << _DTYPE_SHIFT | order << _ORDER_SHIFT
        if self._write(tensor, index, site, call, step, seq, flags):
            code |= IS_BAD
        return code

    def add_device(self, tensor: torch.Tensor, /) -> None:
        self._known.add(tensor.device.type)
