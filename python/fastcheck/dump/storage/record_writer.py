"""Reads tensors into records and appends these to a log, a block at a time; writes each value once,
however many calls read it.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any, Optional

import numpy as np
import torch

from fastcheck.backends.complete_records import host_observers
from fastcheck.errors import UnsupportedTensorError
from fastcheck.extension import status
from fastcheck.log.writer import RecordLog
from fastcheck.record.format import RECORD_BYTES, RECORD_DTYPE, VALUE_BYTES, Depth, Flag, nonfinite
from fastcheck.statistics.functions import stats
from fastcheck.utils.torch.own_operators import unobserved
from fastcheck.utils.torch.readable import can_read, unreadable_reason

from .shards import ShardWriter, Slot

_SLOTS = 1024
_IN_FLIGHT = "pinned memory of the host, to which a copy from a device may be under way"
_NOTHING = contextlib.nullcontext()


@dataclass(eq=False)
class RecordWriter:
    """The records of one dump, in the order in which they are read; ``values`` writes the values,
    None: they are not wanted.

    Not thread-safe. CPU tensors are read at once. Those of devices are read where they are, in the
    order of their stream, and fetched when the slots are full; with their values, tensors are
    copied to the host, which waits for the device.
    """

    _log: RecordLog
    _step: int
    _depth: int
    _is_logical: bool
    _values: Optional[ShardWriter]

    def __post_init__(self) -> None:
        #: The number of the next record.
        self.count = 0
        #: The number of values that were written before, by an earlier call.
        self.shared_count = 0
        self._written: dict[tuple[object, ...], Slot] = {}
        self._observe, _ = host_observers()
        self._slots = torch.zeros(_SLOTS * RECORD_BYTES, dtype=torch.uint8, device="cpu")
        self._records: np.ndarray = self._slots.numpy().view(RECORD_DTYPE)
        #: Slots that hold a record which is not in the log yet.
        self.used = 0
        # Slots whose record is still on a device: that record; number, site, call and flags.
        self._pending: list[tuple[int, torch.Tensor, tuple[int, int, int, int]]] = []

    def op_recorder(self, python: object) -> Optional[Any]:
        """An OpRecorder (csrc/torch/dump/module.h) that writes here as read() does; None: the
        extension is missing, or values are wanted, or the logical order.
        """
        if status.module is None or self._values is not None or self._is_logical:
            return None
        return status.module.OpRecorder(python, self, self._slots, self._depth, self._step)

    def read(self, tensor: torch.Tensor, site: int, call: int, flags: int = 0) -> dict[str, Any]:
        """Reads a tensor; the fields of its entry in the index: ``seq``, the number of its record,
        or a ``problem`` when it can't be read.
        """
        if not can_read(tensor):
            return {"problem": unreadable_reason(tensor) or _IN_FLIGHT}
        seq = self.count
        host = tensor
        if not tensor.is_cpu and self._values is not None:
            with unobserved():
                host = tensor.detach().cpu()
        index = self.used
        try:
            if host.is_cpu and not self._is_logical:
                # The portable backend alone among the observers is made of operators.
                with _NOTHING if status.module is not None else unobserved():
                    self._observe(
                        host, self._slots, index, self._depth, site, call, self._step, seq, flags
                    )
            else:
                with unobserved():
                    read = stats(
                        host.detach(),
                        record=Depth(self._depth).name.lower(),
                        order="logical" if self._is_logical else "storage",
                    )
                self._put(index, read.tensor, site, call, flags)
        except TypeError as error:
            if not isinstance(error, UnsupportedTensorError) and unreadable_reason(host) is None:
                raise  # an error of the call, not of the tensor
            return {"problem": str(error)}
        fields: dict[str, Any] = {"seq": seq}
        self.count += 1
        self.used += 1
        if self._values is not None:
            with unobserved():
                slot = self._place_of(host, self._records[index], self._values)
            if slot is not None:
                fields["value"] = [slot.file, slot.key]
        if self.used == _SLOTS:
            self.flush()
        return fields

    def _place_of(
        self, tensor: torch.Tensor, record: np.void, values: ShardWriter
    ) -> Optional[Slot]:
        """The file and key of the values of ``tensor``, whose ``record`` has full depth; written
        unless its checksum tells that they have been. None when they can't be.
        """
        # The checksum is of the elements as they lie in memory.
        strides = None if tensor.is_contiguous() else tensor.stride()
        key = (record.tobytes()[:VALUE_BYTES], tensor.dtype, tuple(tensor.shape), strides)
        slot = self._written.get(key)
        self.shared_count += slot is not None
        if slot is None and (slot := values.put(tensor)) is not None:
            self._written[key] = slot
        return slot

    def _put(self, index: int, row: torch.Tensor, site: int, call: int, flags: int) -> None:
        if row.is_cpu:
            self._records[index] = row.numpy().view(RECORD_DTYPE)[0]
            self._identify(index, self.count, site, call, flags)
        else:
            self._pending.append((index, row, (self.count, site, call, flags)))

    def _identify(self, index: int, seq: int, site: int, call: int, flags: int) -> None:
        record = self._records[index : index + 1]
        record["seq"], record["step"], record["site"], record["call"] = seq, self._step, site, call
        record["flags"] = flags
        record["flags"] |= nonfinite(record).astype(np.uint32) * np.uint32(Flag.NONFINITE)

    def flush(self) -> None:
        """Fetches the records of devices, and writes all records to the log."""
        if self._pending:
            with unobserved():
                rows = [row.cpu().numpy().view(RECORD_DTYPE)[0] for _, row, _ in self._pending]
            for (index, _, identity), row in zip(self._pending, rows):
                self._records[index] = row
                self._identify(index, *identity)
            self._pending.clear()
        if self.used:
            self._log.append(self._records[: self.used], self._step)
            self.used = 0
