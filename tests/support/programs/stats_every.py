"""Training with ``stats_every=``, on any device, and what its records have to be."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, Optional

import numpy as np
import torch

import fastcheck
from fastcheck.record.format import COUNTS, Depth
from support.programs.training import Apply, batches, deep, poison

#: Options that decide how tensors are read.
LEVELS: list[dict[str, Any]] = [{}, {"level": "op"}, {"record": "stats"}]
#: Fields that a reading at any depth has.
_ALWAYS = (*COUNTS, "seq", "step", "call", "site", "flags", "dtype", "order")


def run(
    device: str, steps: int = 9, fault: Optional[int] = None, **options: Any
) -> tuple[fastcheck.Monitor, list[torch.Tensor]]:
    """A model that trains with an optimizer, a NaN in the step ``fault``; its monitor, flushed, and
    its losses.
    """
    torch.manual_seed(0)
    model = deep(2).to(device)
    model.add_module("loss", Apply(lambda x: x.square().mean()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    options = {"log": fastcheck.Log(None, history=100), **options}
    monitor = fastcheck.install(model, **options)
    losses = []
    with ExitStack() as stack:
        stack.callback(monitor.remove)
        for step, x in enumerate(batches(steps)):
            x = x.to(device)
            loss = model(poison(x) if step == fault else x)
            optimizer.zero_grad()
            loss.backward()
            if step != fault:
                optimizer.step()
            monitor.step(loss=loss)
            losses.append(loss.detach())
            monitor.flush()  # so that small tensors soon wait for each other
        stack.pop_all()
    return monitor, losses


def whole_steps(monitor: fastcheck.Monitor) -> set[int]:
    """The steps of which every record is whole."""
    records = monitor.records()
    return set(records["step"].tolist()) - set(
        records["step"][records["depth"] == Depth.HEALTH].tolist()
    )


def assert_counts_between(device: str, **options: Any) -> None:
    """Every third step has the records of a run without ``stats_every=``, to the byte; the others
    have their counts, and whole ones of what has one element.
    """
    unbroken, losses = run(device, **options)
    before, known = unbroken.records(), [row.loss for row in unbroken.step_table()]
    unbroken.remove()
    monitor, same = run(device, stats_every=3, **options)
    now = monitor.records()
    assert whole_steps(monitor) == {0, 3, 6}
    monitor.remove()  # at op level it would read what follows
    assert [x.item() for x in losses] == [x.item() for x in same]
    assert None not in known and [row.loss for row in monitor.step_table()] == known
    assert len(before) == len(now) > 9 * 10
    is_whole = now["depth"] == before["depth"]
    assert now[is_whole].tobytes() == before[is_whole].tobytes()
    counted, given = now[~is_whole], before[~is_whole]
    assert set(counted["step"].tolist()) == {1, 2, 4, 5, 7, 8}
    assert (counted["depth"] == Depth.HEALTH).all() and (counted["numel"] > 1).all()
    assert (now["numel"][is_whole & (now["step"] % 3 > 0)] == 1).all()
    for field in _ALWAYS:
        assert np.array_equal(counted[field], given[field]), field
    for field in ("min", "max", "sum", "abs_sum", "sum_sq", "checksum"):
        assert not counted[field].any()
