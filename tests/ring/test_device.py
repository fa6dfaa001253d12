"""DeviceRing: the rows of a recorder after their segment was taken back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from fastcheck.backends.table import backend_for
from fastcheck.ring.device import DeviceRing
from fastcheck.utils.torch.streams import streams_of

pytestmark = pytest.mark.fake_accelerator


def test_rows_stay_full_when_their_segment_is_used_again(fake_accelerator: Any) -> None:
    """A recorder that was given no later rows must not write to a segment that is free, or in use
    for other records.
    """
    device = torch.device("fake")
    streams = streams_of(device)
    assert streams is not None
    ring = DeviceRing(streams, backend_for(device), 64, segment_slots=3, max_segments=1)
    tensor = torch.ones(8, device=device)

    def read(seq: int) -> None:
        ring.observe(tensor, (seq, 0, 0, 0, 0, 0, 0))

    def cut() -> Sequence[int]:
        records, segments = ring.cut()
        for segment in segments:
            segment.wait()
            records.append(ring.take(segment))
        return [int(seq) for part in records for seq in part["seq"]]

    for seq in range(3):
        read(seq)
    rows = ring.next_rows()
    assert rows is not None and rows.cursor.slot == len(rows.slots)
    records, (segment,) = ring.cut()
    read(3)  # every segment is in flight
    assert ring.lost_count == 1 and ring.next_rows() is None
    segment.wait()
    assert [int(seq) for seq in ring.take(segment)["seq"]] == [0, 1, 2] and not records
    assert rows.cursor.slot == len(rows.slots)
    for seq in range(4, 7):
        read(seq)
    assert cut() == [4, 5, 6]
