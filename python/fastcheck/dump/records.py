"""Reads tensors into Records and hands these to a log, piece by piece."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, Optional

import numpy as np
import torch

from .._errors import UnsupportedTensorError
from .._extension import status
from .._host_observe import host_observers
from .._log import RecordLog
from .._ops import stats
from .._readable import can_read, unreadable_reason
from .._record import RECORD_BYTES, RECORD_DTYPE, Flag, nonfinite
from .values import ValueStore

__all__ = ["RecordWriter", "is_quiet", "quiet"]

_SLOTS = 1024
_DEPTHS = ("", "health", "stats", "full")
_NOTHING = contextlib.nullcontext()


class _Quiet(threading.local):
    depth = 0


_quiet = _Quiet()


def is_quiet() -> bool:
    """Whether this thread is within a dump's own work."""
    return _quiet.depth > 0


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """What the dump computes for itself is seen by no dump, by no other mode, and by no monitor."""
    observer = None if status.module is None else status.module.op_observer()
    is_watched = observer is not None and observer.run() != 0
    _quiet.depth += 1
    try:
        with contextlib.ExitStack() as stack:
            if torch._C._len_torch_dispatch_stack():
                from torch.utils._python_dispatch import _disable_current_modes

                stack.enter_context(_disable_current_modes())
            if is_watched and observer is not None:
                observer.pause(1)
                stack.callback(observer.pause, -1)
            yield
    finally:
        _quiet.depth -= 1


class RecordWriter:
    """The records of one dump, in the order in which they are read; ``store`` takes the values.

    Not thread-safe. CPU tensors are read at once. Those of devices are read where they are, in the
    order of their stream, and fetched when so many have gathered; with a store they are copied to
    the host, which waits for them.
    """

    def __init__(
        self, log: RecordLog, step: int, depth: int, is_logical: bool, store: Optional[ValueStore]
    ) -> None:
        #: The number of the next record.
        self.count = 0
        self._log = log
        self._step = step
        self._depth = depth
        self._is_logical = is_logical
        self._store = store
        self._observe, _ = host_observers()
        self._slots = torch.zeros(_SLOTS * RECORD_BYTES, dtype=torch.uint8, device="cpu")
        self._records: np.ndarray = self._slots.numpy().view(RECORD_DTYPE)
        #: Slots that hold a record which is not in the log yet.
        self.used = 0
        # Of slots that a device still owes: its record, on the device.
        self._owed: list[tuple[int, torch.Tensor]] = []
        self._identities: list[tuple[int, int, int, int]] = []

    def op_recorder(self, python: object) -> Optional[Any]:
        """An OpRecorder (csrc/torch/dump/module.h) that writes here as read() does; None: the
        extension is missing, or values are wanted, or the logical order.
        """
        if status.module is None or self._store is not None or self._is_logical:
            return None
        return status.module.OpRecorder(python, self, self._slots, self._depth, self._step)

    def read(
        self, tensor: torch.Tensor, site: int, call: int, flags: int = 0
    ) -> tuple[dict[str, Any], int]:
        """What the index says of the reading, and its number; -1 when the tensor can't be read, of
        which the index says why.
        """
        if not can_read(tensor):
            return {"problem": unreadable_reason(tensor) or "no plain tensor"}, -1
        seq = self.count
        host = tensor
        if not tensor.is_cpu and self._store is not None:
            with quiet():
                host = tensor.detach().cpu()
        index = self.used
        try:
            if host.is_cpu and not self._is_logical:
                # Of the two observers only the portable backend is made of operators.
                with _NOTHING if status.module is not None else quiet():
                    self._observe(
                        host, self._slots, index, self._depth, site, call, self._step, seq, flags
                    )
            else:
                with quiet():
                    read = stats(
                        host.detach(),
                        depth=_DEPTHS[self._depth],
                        order="logical" if self._is_logical else "storage",
                    )
                self._put(index, read.tensor, site, call, flags)
        except (TypeError, UnsupportedTensorError) as error:
            return {"problem": str(error)}, -1
        said: dict[str, Any] = {"seq": seq}
        self.count += 1
        self.used += 1
        if self._store is not None:
            with quiet():
                slot = self._store.put(host, self._records[index])
            if slot is not None:
                said["value"] = [slot.file, slot.key]
        if self.used == _SLOTS:
            self.flush()
        return said, seq

    def _put(self, index: int, row: torch.Tensor, site: int, call: int, flags: int) -> None:
        if row.is_cpu:
            self._records[index] = row.numpy().view(RECORD_DTYPE)[0]
            self._identify(index, self.count, site, call, flags)
        else:
            self._owed.append((index, row))
            self._identities.append((self.count, site, call, flags))

    def _identify(self, index: int, seq: int, site: int, call: int, flags: int) -> None:
        record = self._records[index : index + 1]
        record["seq"], record["step"], record["site"], record["call"] = seq, self._step, site, call
        record["flags"] = flags
        record["flags"] |= nonfinite(record).astype(np.uint32) * np.uint32(Flag.NONFINITE)

    def flush(self) -> None:
        """Fetches what devices owe, and writes all that was read."""
        if self._owed:
            with quiet():
                rows = [row.cpu().numpy().view(RECORD_DTYPE)[0] for _, row in self._owed]
            for (index, _), row, identity in zip(self._owed, rows, self._identities):
                self._records[index] = row
                self._identify(index, *identity)
            self._owed.clear()
            self._identities.clear()
        if self.used:
            self._log.append(self._records[: self.used], self._step)
            self.used = 0
