"""Trace: the checksums of every tensor of one run of a step, in the order of the program."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Optional

import numpy as np
import torch

from fastcheck.errors import UnsupportedTensorError
from fastcheck.record.format import Depth, Flag, nonfinite
from fastcheck.record.site import Site, SiteTable
from fastcheck.record.statistics import extreme_values
from fastcheck.statistics.functions import stats
from fastcheck.utils.torch.flatten import flatten
from fastcheck.utils.torch.sharding import local

from .result import Difference

#: Which tensor: its site, the call, and how many of the same came before.
_Key = tuple[Site, int, int]


class Trace:
    """What one run left. ``error``: what it raised."""

    def __init__(self) -> None:
        self.error = ""
        self._rows: dict[_Key, np.void] = {}
        self._seen: dict[tuple[Site, int], int] = {}
        self._phases: dict[_Key, str] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def add_records(self, records: np.ndarray, sites: SiteTable) -> None:
        """Those of the monitor that observed the run."""
        again = (records["flags"] & int(Flag.RECOMPUTE)) != 0
        for record in records[(records["depth"] >= Depth.FULL) & ~again]:
            site = sites[int(record["site"])]
            self._add(site, int(record["call"]), record, site.direction)

    def add_tensors(self, named: Iterable[tuple[Site, torch.Tensor]]) -> None:
        """Those that the run has left behind. Waits for their devices."""
        by_device: dict[torch.device, list[tuple[Site, torch.Tensor]]] = {}
        for site, tensor in named:
            by_device.setdefault(tensor.device, []).append((site, tensor))
        for pairs in by_device.values():
            records: Iterable[Optional[np.void]]
            try:
                records = stats([tensor for _, tensor in pairs]).numpy()
            except UnsupportedTensorError:  # one of them: the others are read
                records = [_record_of(tensor) for _, tensor in pairs]
            for (site, _), record in zip(pairs, records):
                if record is not None:
                    self._add(site, 0, record, "after")

    def _add(self, site: Site, call: int, record: np.void, phase: str) -> None:
        count = self._seen.get((site, call), 0)
        self._seen[site, call] = count + 1
        self._rows[site, call, count] = record
        self._phases[site, call, count] = phase

    @property
    def content(self) -> dict[_Key, tuple[int, int, int]]:
        """What has to be the same in two runs."""
        return {key: _bits(record) for key, record in self._rows.items()}

    def difference(self, key: _Key, place: int, other: Trace, run: int) -> Difference:
        """``other``: run number ``run``, in which this tensor is another one."""
        first, second = self._rows.get(key), other._rows.get(key)
        phase = self._phases.get(key) or other._phases[key]
        return Difference(key[0], key[1], phase, place, 0, run, (_values(first), _values(second)))


def differences_between(first: Trace, other: Trace, run: int) -> list[Difference]:
    """The tensors that are not the same in the first run and in run number ``run``, in the order of
    the first; then those that only the other has.
    """
    known, seen = first.content, other.content
    # What only the other has comes where it came there, before what it has moved back.
    places = {key: (place, 1) for place, key in enumerate(known)}
    for place, key in enumerate(seen):
        places.setdefault(key, (place, 0))
    keys = [key for key in places if known.get(key) != seen.get(key)]
    keys.sort(key=places.__getitem__)
    return [first.difference(key, places[key][0], other, run) for key in keys]


def stored_tensors(
    models: Sequence[torch.nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    returned: object,
) -> list[tuple[Site, torch.Tensor]]:
    """What a step leaves: what it returned, gradients, the state of the optimizers, weights and
    buffers.
    """
    found: list[tuple[Site, torch.Tensor]] = []

    def add(role: str, label: str, value: object, kind: str) -> None:
        if isinstance(value, torch.Tensor):
            found.append((Site("", kind, "optimizer", role, 0, label), local(value)))

    for name, tensor in flatten(returned, "returned"):
        found.append((Site("", "step", "forward", "output", 0, name), local(tensor)))
    names = {
        id(parameter): name for model in models for name, parameter in model.named_parameters()
    }
    for model in models:
        for name, parameter in model.named_parameters():
            add("param_grad", name, parameter.grad, type(model).__name__)
    for optimizer in optimizers:
        for owner, state in optimizer.state.items():
            for key, value in state.items() if isinstance(state, dict) else ():
                name = f"{names.get(id(owner), 'a parameter')}.{key}"
                add("optimizer_state", name, value, type(optimizer).__name__)
    for model in models:
        kind = type(model).__name__
        for name, parameter in model.named_parameters():
            add("param", name, parameter, kind)
        for name, buffer in model.named_buffers():
            add("buffer", name, buffer, kind)
    return found


def _record_of(tensor: torch.Tensor) -> Optional[np.void]:
    try:
        return stats(tensor).record
    except UnsupportedTensorError:
        return None


def _bits(record: np.void) -> tuple[int, int, int]:
    # Not the sums: of backends without a kernel they may depend on the order of additions.
    return int(record["checksum"]), int(record["numel"]), int(record["dtype"])


def _values(record: Optional[np.void]) -> Optional[dict[str, Any]]:
    if record is None:
        return None
    rows = np.array([record])
    low, high = extreme_values(rows, "min"), extreme_values(rows, "max")
    return {
        "checksum": int(record["checksum"]),
        "numel": int(record["numel"]),
        "abs_max": float(np.maximum(np.abs(low), np.abs(high))[0]),
        "nonfinite": int(nonfinite(rows)[0]),
    }
