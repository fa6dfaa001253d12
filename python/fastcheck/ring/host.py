"""Records of tensors on the CPU: HostRing is a preallocated block of slots that kernels write to.
HookReader does what a hook does with a tensor: it checks that it can be read and is new and, on the
CPU, writes its record.

The ring never allocates after construction, and a record can be read as soon as it is written. A
full ring calls ``when_full``, which takes the records out, and starts again at the first slot.
``ring/device.py`` has the ring of other devices. The extension has a HookReader of its own
(csrc/torch/hooks/reader.h).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Callable, Optional

import numpy as np
import torch

from fastcheck.backends.backend import Observe
from fastcheck.backends.complete_records import host_observers, observe_on_host
from fastcheck.backends.portable.traversal import dtype_and_order
from fastcheck.extension import compiled
from fastcheck.record.format import RECORD_DTYPE, nonfinite
from fastcheck.utils.torch.readable import can_hold_nonfinite, can_read
from fastcheck.utils.torch.seen_tensors import SeenTensors

from .depths import Depths


class Cursor:
    """``seq``: the number of the next record. ``slot``: the slot of the host ring that a record of
    a CPU tensor goes to.
    """

    __slots__ = ("seq", "slot")

    def __init__(self) -> None:
        self.seq = 0
        self.slot = 0


def new_cursor() -> Cursor:
    """A Cursor of the extension (csrc/torch/hooks/call.h), which its recorder moves too; without it
    one of the class above.
    """
    module = compiled()
    return Cursor() if module is None else module.Cursor()


# 768 KiB: several steps of a model of a few hundred modules, so that it is rarely full in a step.
CAPACITY = 4096


class HostRing:
    """Slots [0, used) hold records. Not thread-safe: the caller holds the session's lock."""

    def __init__(
        self, depths: Depths, when_full: Callable[[], None], cursor: Optional[Cursor] = None
    ) -> None:
        # Not the default device, which the user may have set to another.
        slots = torch.zeros(CAPACITY * RECORD_DTYPE.itemsize, dtype=torch.uint8, device="cpu")
        self.slots = slots
        self._records: np.ndarray = slots.numpy().view(RECORD_DTYPE)
        self._bytes = slots.numpy().data
        self._cursor = cursor or new_cursor()
        self.depths = depths
        self._when_full = when_full
        self._observe, self._observe_list = host_observers()

    @property
    def used(self) -> int:
        return self._cursor.slot

    @used.setter
    def used(self, value: int) -> None:
        self._cursor.slot = value

    def observe(
        self, tensor: torch.Tensor, *identity: int, observe: Optional[Observe] = None
    ) -> bool:
        """Reads ``tensor`` into the next slot. True when it holds anything non-finite.
        ``identity``: site, call, step, seq and flags.
        """
        cursor = self._cursor
        if cursor.slot == CAPACITY:
            self._when_full()
        if observe is None:
            depths = self.depths
            depth = depths.now if depths.now == depths.whole else depths.of(tensor)
            is_bad = self._observe(tensor, self.slots, cursor.slot, depth, *identity)
        else:
            is_bad = self.write(tensor, cursor.slot, *identity, observe=observe)
        # After the write: a tensor that the kernel refuses takes no slot.
        cursor.slot += 1
        return is_bad

    def next_slot(self) -> int:
        """The number of a free slot; after writing it the caller increments ``used``."""
        cursor = self._cursor
        if cursor.slot == CAPACITY:
            self._when_full()
        return cursor.slot

    def write(
        self, tensor: torch.Tensor, index: int, *identity: int, observe: Optional[Observe] = None
    ) -> bool:
        """Reads ``tensor`` into this slot, as observe(). ``observe`` takes the place of the
        backend's.
        """
        depth = self.depths.of(tensor)
        if observe is not None:
            return observe_on_host(tensor, self.slots, index, depth, *identity, observe=observe)
        return self._observe(tensor, self.slots, index, depth, *identity)

    def observe_list(
        self,
        tensors: Sequence[torch.Tensor],
        sites: Sequence[int],
        step: int,
        first_seq: int,
        flags: int,
    ) -> list[np.ndarray]:
        """Reads many tensors in one call, or in several when they don't fit. Returns copies of the
        records that are non-finite, in pieces.
        """
        bad: list[np.ndarray] = []
        start, count, cursor = 0, len(tensors), self._cursor
        while start < count:
            if cursor.slot == CAPACITY:
                self._when_full()
            first = cursor.slot
            stop, part, numbers = count, tensors, sites
            if start or count > CAPACITY - first:
                stop = min(count, start + CAPACITY - first)
                part, numbers = tensors[start:stop], sites[start:stop]
            bad_count = self._observe_list(
                part, self.slots, first, self.depths.now, numbers, step, first_seq + start, flags
            )
            cursor.slot = first + stop - start
            start = stop
            if bad_count:
                records = self._records[first : cursor.slot]
                bad.append(records[nonfinite(records)].copy())
        return bad

    def last(self) -> np.void:
        """A copy of the record that was written last."""
        return self._records[self.used - 1].copy()

    def take(self) -> np.ndarray:
        """A copy of every record in the ring, oldest first; the ring is empty afterwards."""
        used, self._cursor.slot = self._cursor.slot, 0
        # Copied as bytes: records are copied field by field.
        copy = bytearray(self._bytes[: used * RECORD_DTYPE.itemsize])
        return np.ndarray(used, RECORD_DTYPE, copy)


#: read() returns them for a tensor that can't be read, and for one of a type of device that was not
#: added.
UNREAD, UNKNOWN_DEVICE = -1, -2
#: Bits of read()'s result for other tensors.
IS_NEW, IS_BAD, ELSEWHERE, NEEDS_GRADIENT, NEW_STREAM = 1, 2, 4, 8, 16
_DTYPE_SHIFT, _ORDER_SHIFT = 5, 10
#: The bits above them: the sequence number under which the tensor is remembered.
SEQ_SHIFT = 11
#: The seq of a tensor that could not be read; larger than any sequence number.
NO_SEQ = 2**50


def identity_of(code: int) -> tuple[int, int]:
    """The dtype code and the order of the record of a tensor ELSEWHERE."""
    return (code >> _DTYPE_SHIFT) & 31, (code >> _ORDER_SHIFT) & 1


def make_reader(seen: SeenTensors, ring: HostRing) -> HookReader:
    """A reader that remembers tensors in ``seen`` and writes records to slots of ``ring``."""
    module = compiled()
    if module is None:
        return HookReader(seen, ring.write)
    return module.hook_reader(seen, ring.slots, ring.depths.whole)


class HookReader:
    """Reads tensors in hooks into the slots of a ring. Not thread-safe: the caller holds the
    session's lock. That of the extension knows the streams of devices; this one sets NEW_STREAM for
    every tensor on a device.
    """

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
        """UNREAD, UNKNOWN_DEVICE, or bits and a seq, as above. ``index``: the slot that a record
        goes to. ``any_dtype``: integers are read too. Raises the kernel's error for a tensor that
        it refuses, which is remembered by then. Does not synchronise.
        """
        if not (any_dtype or can_hold_nonfinite(tensor)):
            return UNREAD
        if tensor.device.type not in self._known:
            return UNKNOWN_DEVICE
        if not can_read(tensor):
            return UNREAD
        tensor_seq = self._seen.add(tensor, seq)
        if tensor_seq == NO_SEQ:
            return UNREAD
        if tensor_seq >= 0:
            return tensor_seq << SEQ_SHIFT
        code = seq << SEQ_SHIFT | IS_NEW
        if tensor.requires_grad:
            code |= NEEDS_GRADIENT
        if not tensor.is_cpu:
            dtype, order = dtype_and_order(tensor)
            return code | ELSEWHERE | NEW_STREAM | dtype << _DTYPE_SHIFT | order << _ORDER_SHIFT
        if self._write(tensor, index, site, call, step, seq, flags):
            code |= IS_BAD
        return code

    def add_device(self, tensor: torch.Tensor, /) -> None:
        """Lets tensors on this tensor's type of device be read from now on. Not needed for the
        CPU.
        """
        self._known.add(tensor.device.type)

    def set_depth(self, depth: int, /) -> None:
        """Sets Depths.now of what is read from now on: here the ring has them."""
