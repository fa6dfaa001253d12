"""SpikeReruns: runs a step again whose numbers jumped, and compares it with what it was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Callable, Optional

import numpy as np
import torch

from fastcheck.errors import ConfigError, explain, first_line
from fastcheck.monitor.session.config import Config
from fastcheck.monitor.session.session import Session
from fastcheck.record.format import Depth, Flag
from fastcheck.record.site import Site, SiteTable
from fastcheck.record.statistics import extreme_values
from fastcheck.utils.torch.flatten import flatten
from fastcheck.utils.torch.rank import group_size
from fastcheck.utils.torch.training_state import TrainingState
from fastcheck.utils.torch.versions import GradScaler

from .runner import Install, Runner

__all__ = ["SpikeReruns", "called", "check_rerun"]

_SPIKES = ("loss_spike", "gradient_spike", "explosion")
# What two readings of the same bits have in common, whatever the order of their sums.
_COMPARED = (
    "numel", "dtype", "nan_count", "posinf_count", "neginf_count", "zero_count", "min", "max",
)  # fmt: skip


def check_rerun(config: Config) -> None:
    """ConfigError among several ranks: they would have to run the step together, and each has
    events of its own.
    """
    ranks = group_size(config.training.process_group)
    if ranks > 1:
        raise ConfigError(
            explain(
                "Watch(rerun=) can't be used among several ranks",
                expected="one rank: a step that is run again is run by all of them together, and "
                "each rank has events of its own",
                got=f"{ranks} ranks",
                hint="call fastcheck.rerun() on every rank, at a step that all agree on",
            )
        )


def called(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``function(*args, **kwargs)``."""
    return function(*args, **kwargs)


@dataclass(frozen=True)
class _Kept:
    """A call of the step's function, and the state that it began with."""

    step: int
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    state: TrainingState


class SpikeReruns:
    """Of one monitor. ``events``: the events of the watch, as (step, kind). ``report``: takes the
    step, a text and the cause of a rerun.
    """

    def __init__(
        self,
        session: Session,
        optimizers: Callable[[], Sequence[torch.optim.Optimizer]],
        models: Callable[[], Sequence[torch.nn.Module]],
        install: Install,
        also: Sequence[Any],
        events: Callable[[], Sequence[tuple[int, str]]],
        report: Callable[[int, str, str], None],
    ) -> None:
        self._session = session
        self._optimizers = optimizers
        self._models = models
        self._install = install
        self._also = also
        self._events = events
        self._report = report
        self._kept: Optional[_Kept] = None

    def run(
        self,
        inner: Callable[..., Any],
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """``inner(function, args, kwargs)``, a step that can be run again; before it the last one,
        if its numbers jumped.
        """
        session = self._session
        if session.removed:  # within a step that is run again
            return inner(function, args, kwargs)
        try:
            self._judge()
            self._keep(function, args, kwargs)
        except Exception as error:
            self._kept = None
            session.report_internal_error("the rerun of a step", error)
        return inner(function, args, kwargs)

    def _judge(self) -> None:
        """Ends the last step, as its next forward pass would; runs it again if it has spiked."""
        kept, self._kept = self._kept, None
        session = self._session
        with session.lock:
            if session.is_closed:
                session.begin_step_if_closed()
            session.flush()
            last = session.step.index
        found = () if kept is None else self._events()
        if kept is None or not any(
            kind in _SPIKES and kept.step <= step < last for step, kind in found
        ):
            return
        with session.lock, session.event_store.lock:
            records = session.event_store.history.all()
        text, cause = self._rerun(kept, records[records["step"] == kept.step], session.sites)
        self._report(kept.step, text, cause)

    def _keep(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        tensors = [tensor for _, tensor in flatten((args, kwargs), "batch")]
        state = TrainingState(
            self._models(),
            self._scaler(),
            optimizers=self._optimizers(),
            others=self._also,
            tensors=[tensor for tensor in tensors if not tensor.is_inference()],
        )
        self._kept = _Kept(self._session.step.index, function, args, kwargs, state)

    def _scaler(self) -> Optional[GradScaler]:
        given = self._session.step.scaler
        scaler = self._session.config.training.scaler if given is None else given()
        return scaler if isinstance(scaler, GradScaler) else None

    def _rerun(self, kept: _Kept, records: np.ndarray, sites: SiteTable) -> tuple[str, str]:
        """What two more runs of the step show, and the cause."""
        runs: list[tuple[list[np.ndarray], SiteTable]] = []

        def install(config: Config, models: Sequence[torch.nn.Module]) -> Any:
            monitor = self._install(config, models)
            chunks: list[np.ndarray] = []
            runs.append((chunks, monitor.sites))
            monitor._session.event_store.step_listeners.append(
                lambda step, rows, found: chunks.extend(found)
            )
            return monitor

        runner = Runner(
            install,
            self._models(),
            self._optimizers(),
            self._scaler(),
            tuple(self._also),
        )
        try:
            result = runner.run(kept.function, kept.args, 2, kept.state.put_back, **kept.kwargs)
        except Exception as error:  # the step's own
            text = f"{type(error).__name__}: {first_line(error)}"
            return f"the step was run again from the same state, and failed: {text}", "program"
        if not result.identical:
            where = "" if result.first is None else f" First that differs: {result.first}."
            text = f"the step was run {result.runs} times from the same state, with other bits."
            return f"{text}{where} {result.why}", result.cause
        chunks, its_sites = runs[0]
        first = _first_difference(_keyed(records, sites), _keyed(np.concatenate(chunks), its_sites))
        if first is None:
            return "run again from the same state, the step has the same numbers", "program"
        site, was, now = first
        text = f"run again twice from the same state, the step has other numbers at {site}: "
        text += f"abs max {_abs_max(was):.6g} then, {_abs_max(now):.6g} now"
        is_on_cpu = all(p.is_cpu for model in self._models() for p in model.parameters())
        is_exact = is_on_cpu or torch.are_deterministic_algorithms_enabled()
        return text, "hardware" if is_exact else ""


#: Which tensor: its site, the call, and how many of the same came before.
_Key = tuple[Site, int, int]


def _keyed(records: np.ndarray, sites: SiteTable) -> dict[_Key, np.void]:
    """Those with statistics, in the order in which they were read."""
    again = (records["flags"] & int(Flag.RECOMPUTE)) != 0
    found: dict[_Key, np.void] = {}
    counts: dict[tuple[Site, int], int] = {}
    for record in records[(records["depth"] >= Depth.STATS) & ~again]:
        site, call = sites[int(record["site"])], int(record["call"])
        count = counts.get((site, call), 0)
        counts[site, call] = count + 1
        found[site, call, count] = record
    return found


def _first_difference(
    was: dict[_Key, np.void], now: dict[_Key, np.void]
) -> Optional[tuple[Site, np.void, np.void]]:
    """The first tensor that both have, with other numbers."""
    for key, record in was.items():
        other = now.get(key)
        if other is not None and any(
            record[name].tobytes() != other[name].tobytes() for name in _COMPARED
        ):
            return key[0], record, other
    return None


def _abs_max(record: np.void) -> float:
    rows = np.array([record])
    low, high = extreme_values(rows, "min"), extreme_values(rows, "max")
    return float(np.maximum(np.abs(low), np.abs(high))[0])
