"""install(stats_every=) on an accelerator."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fastcheck.backends.table import backend_for
from fastcheck.record.format import Depth
from fastcheck.ring.depths import Depths
from fastcheck.ring.device import DeviceRing
from fastcheck.utils.torch.streams import streams_of
from support.devices.training_on_fake import NAME
from support.programs.stats_every import LEVELS, assert_counts_between, run, whole_steps
from support.programs.training import stopped, where

pytestmark = [pytest.mark.fake_accelerator, pytest.mark.usefixtures("fake_accelerator")]


@pytest.mark.parametrize("kernels", ["fake_accelerator", "cuda_on_fake_device"])
@pytest.mark.parametrize("options", LEVELS)
def test_steps_between_have_the_counts(
    options: dict[str, Any], kernels: str, op_observer: None, request: pytest.FixtureRequest
) -> None:
    """By CUDA's kernels, over the host shim, small tensors wait for each other, and op level starts
    its launches in C++.
    """
    request.getfixturevalue(kernels)
    assert_counts_between(NAME, overflow_nums=-1, **options)


@pytest.mark.parametrize("options", LEVELS)
def test_a_step_that_is_only_counted_stops_as_any_other(
    options: dict[str, Any], op_observer: None
) -> None:
    expected = stopped(run, NAME, fault=4, sync="step", **options)
    stop = stopped(run, NAME, fault=4, sync="step", stats_every=3, **options)
    assert (stop.step, where(stop.culprit)) == (4, where(expected.culprit))
    assert stop.culprit.record["nan_count"] == 1


def test_steps_after_an_event_are_whole() -> None:
    monitor, _ = run(NAME, 20, fault=4, stats_every=8, overflow_nums=-1, sync="step")
    assert whole_steps(monitor) == {0, 8, 16} | set(range(5, 13))


def test_a_ring_that_is_full_keeps_records_of_both_depths() -> None:
    """Its reserve has those for which there was no slot, if they are not finite."""
    where_it_is = torch.device(NAME)
    streams, depths = streams_of(where_it_is), Depths(Depth.FULL)
    assert streams is not None
    ring = DeviceRing(streams, backend_for(where_it_is), depths, segment_slots=2, max_segments=1)
    bad = torch.full((3,), float("nan"), device=where_it_is)
    for seq in range(2):
        ring.observe(bad, (seq, 0, 0, 0, 0, 0, 0))
    records, segments = ring.cut()  # the only segment is in flight
    for seq, depth in ((2, Depth.HEALTH), (3, Depth.FULL), (4, Depth.HEALTH)):
        depths.now = int(depth)
        ring.observe(bad, (seq, 0, 0, 0, 0, 0, 0))
    ring.observe_list([bad, bad], [0, 0], 0, 5, 0)
    ring.observe(bad[0], (7, 0, 0, 0, 0, 0, 0))
    segments += ring.cut()[1]
    for segment in segments:
        segment.wait()
        records.append(ring.take(segment))
    found = np.concatenate(records)
    assert found["seq"].tolist() == list(range(8))
    assert found["depth"].tolist() == [3, 3, 1, 3, 1, 1, 1, 3]
    assert ring.lost_count == 6 and (found["nan_count"] > 0).all()
