"""Chooses the values to write: each content once, however many calls read it."""

from __future__ import annotations

from typing import Optional

import numpy as np
import torch

from fastcheck.record.format import VALUE_BYTES

from .shards import ShardWriter, Slot


class ValueStore:
    """Recognises a value that was already written by the checksum in its record."""

    def __init__(self, writer: ShardWriter) -> None:
        self.writer = writer
        self.shared_count = 0
        self._slots: dict[tuple[object, ...], Slot] = {}

    def put(self, tensor: torch.Tensor, record: np.void) -> Optional[Slot]:
        """``record``: of ``tensor``, at full depth. None when it can't be written."""
        # The checksum is of the elements as they lie in memory.
        strides = None if tensor.is_contiguous() else tensor.stride()
        key = (record.tobytes()[:VALUE_BYTES], tensor.dtype, tuple(tensor.shape), strides)
        slot = self._slots.get(key)
        if slot is not None:
            self.shared_count += 1
            return slot
        slot = self.writer.put(tensor)
        if slot is not None:
            self._slots[key] = slot
        return slot
