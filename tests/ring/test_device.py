"""DeviceRing: the rows of a recorder after their segment was taken back, and who rows are of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from fastcheck.backends.table import backend_for
from fastcheck.extension import status
from fastcheck.monitor.loop.hand_changes import probe as probe_of
from fastcheck.ring.depths import Depths
from fastcheck.ring.device import DeviceRing, _identities, _identities_in_python
from fastcheck.utils.torch.streams import streams_of

pytestmark = pytest.mark.fake_accelerator


def test_rows_stay_full_when_their_segment_is_used_again(fake_accelerator: Any) -> None:
    """A recorder that was given no later rows must not write to a segment that is free, or in use
    for other records.
    """
    device = torch.device("fake")
    streams = streams_of(device)
    assert streams is not None
    ring = DeviceRing(streams, backend_for(device), Depths(3), segment_slots=3, max_segments=1)
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


FORMS = {
    "float32": lambda: torch.ones(3, 4),
    "bfloat16": lambda: torch.ones(2, dtype=torch.bfloat16),
    "bool": lambda: torch.ones(5, dtype=torch.bool),
    "empty": lambda: torch.ones(0, 3),
    "rows of a matrix": lambda: torch.ones(4, 4)[::2],
    "transposed": lambda: torch.ones(3, 4).t(),
    "conjugated": lambda: torch.ones(3, 4, dtype=torch.complex64)[::2].conj(),
    "negated": lambda: torch.ones(4, 4, dtype=torch.complex64)[::2].conj().imag,
}


@pytest.mark.skipif(status.module is None, reason="needs the extension")
@pytest.mark.parametrize("is_list", [True, False])
def test_identities_in_both_languages(is_list: bool) -> None:
    tensors = [make() for make in FORMS.values()]
    sites = list(range(7, 7 + len(tensors)))
    given: Any = tensors
    if not is_list:
        given = status.module.TensorList()
        for tensor in tensors:
            given.append(tensor)
    rows = _identities(given, sites, 3, 2**40, 5, 1)
    assert rows.dtype == np.int64
    assert rows.tolist() == _identities_in_python(tensors, sites, 3, 2**40, 5, 1).tolist()
    assert rows[:, 0].tolist() == list(range(2**40, 2**40 + len(tensors)))
    with pytest.raises(ValueError, match="a site for each"):
        _identities(given, sites[1:], 3, 0, 0, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_on_a_device_is_known_by_memory_and_version(
    dtype: torch.dtype, fake_accelerator: Any
) -> None:
    """Its elements are not looked at, for which something would have to wait."""
    gradient = torch.ones(100, dtype=dtype).to("fake")
    probe = probe_of(gradient)
    assert type(probe) is status.module.GradientProbe
    assert probe.has_same_elements(gradient) is None
    assert not probe.is_changed(gradient) and not probe.is_changed(gradient.detach())
    assert probe.is_changed(gradient.clone()) and probe.is_changed(gradient.cpu())
    gradient.mul_(1)
    assert probe.is_changed(gradient)
