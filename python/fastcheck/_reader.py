"""What a hook asks of one tensor: whether it can be read, whether it was read before and, on the
CPU, its record. One call, of the extension (csrc/torch/hook_reader.h) or, where there is none, of
the same in Python.
"""

from __future__ import annotations

from typing import Callable, Protocol

import torch

from ._extension import compiled
from ._readable import can_hold_nonfinite, can_read
from ._ring import HostRing
from ._seen import SeenTensors
from .backends.portable import identity

__all__ = [
    "ELSEWHERE",
    "IS_BAD",
    "IS_NEW",
    "NEEDS_GRADIENT",
    "NEW_STREAM",
    "NO_TOKEN",
    "TOKEN_SHIFT",
    "UNKNOWN_DEVICE",
    "UNREAD",
    "HookReader",
    "identity_of",
    "make_reader",
]

#: What read() gives for a tensor that passes unread, and for one of a device that nobody has told
#: it of.
UNREAD, UNKNOWN_DEVICE = -1, -2
#: Bits of what it gives for any other.
IS_NEW, IS_BAD, ELSEWHERE, NEEDS_GRADIENT, NEW_STREAM = 1, 2, 4, 8, 16
_DTYPE_SHIFT, _ORDER_SHIFT = 5, 10
#: The rest of it: the sequence number under which the tensor is remembered.
TOKEN_SHIFT = 11
#: What a tensor is remembered under that could not be read; larger than any sequence number.
NO_TOKEN = 2**50


def identity_of(code: int) -> tuple[int, int]:
    """The dtype code and the order that the record of a tensor ELSEWHERE will say."""
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
        goes to. ``any_dtype``: integers are read too. Raises what a kernel says to a tensor that it
        refuses, which is remembered by then. Does not synchronise.
        """

    def know(self, tensor: torch.Tensor, /) -> None:
        """Tensors on devices of this one's type are readable too; the CPU's always are."""


def make_reader(seen: SeenTensors, ring: HostRing) -> HookReader:
    """Of tensors that are remembered in ``seen``, and whose records go to slots of ``ring``."""
    module = compiled()
    if module is None:
        return PythonReader(seen, ring.write)
    reader: HookReader = module.hook_reader(seen, ring.slots, ring.depth)
    return reader


class PythonReader:
    """HookReader in Python. Says of every stream that it is another one."""

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
            dtype, order = identity(tensor)
            return code | ELSEWHERE | NEW_STREAM | dtype << _DTYPE_SHIFT | order << _ORDER_SHIFT
        if self._write(tensor, index, site, call, step, seq, flags):
            code |= IS_BAD
        return code

    def know(self, tensor: torch.Tensor, /) -> None:
        self._known.add(tensor.device.type)
