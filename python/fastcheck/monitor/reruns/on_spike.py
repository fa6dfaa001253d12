"""SpikeReruns: runs a step again whose numbers jumped, and compares it with what it was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Callable, Optional

import numpy as np
import torch

from fastcheck.errors import first_line
from fastcheck.log.step_table import StepRow
from fastcheck.monitor.session.config import Config
from fastcheck.monitor.session.listener import Listener
from fastcheck.monitor.session.session import Session
from fastcheck.record.format import Depth, Flag
from fastcheck.record.site import Site, SiteTable
from fastcheck.record.statistics import extreme_values
from fastcheck.utils.torch.flatten import flatten
from fastcheck.utils.torch.gather import of_all_ranks
from fastcheck.utils.torch.rank import group_size
from fastcheck.utils.torch.training_state import TrainingState
from fastcheck.utils.torch.versions import GradScaler
from fastcheck.verdict.step import Step

from .runner import Install, Runner

__all__ = ["SpikeReruns", "called"]

_SPIKES = ("loss_spike", "gradient_spike", "explosion")
# What two readings of the same bits have in common, whatever the order of their sums.
_COMPARED = (
    "numel", "dtype", "nan_count", "posinf_count", "neginf_count", "zero_count", "min", "max",
)  # fmt: skip


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


class _Recorder(Listener):
    """Keeps what the monitor of a rerun has read."""

    def __init__(self, records: list[np.ndarray]) -> None:
        self._records = records

    def step_ended(self, step: Step, rows: Sequence[StepRow], chunks: Sequence[np.ndarray]) -> None:
        self._records.extend(chunks)


class SpikeReruns:
    """Of one monitor. ``events``: the events of the watch, as (step, kind). ``report``: takes the
    step, a text and the cause of a rerun.

    Among several ranks all of them run a step again where one of them has a spike: at each call
    they wait for each other, also where one of them has failed, and end together.
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
        # This rank, or any, takes part no more.
        self._has_failed = self._is_over = False

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
        if self._is_over or self._session.removed:  # removed: or within a step that is run again
            return inner(function, args, kwargs)
        kept, self._kept = self._kept, None
        self._guarded(self._judge, kept)
        if not self._is_over:
            self._guarded(self._keep, function, args, kwargs)
        return inner(function, args, kwargs)

    def _guarded(self, method: Callable[..., None], *args: Any) -> None:
        try:
            method(*args)
        except Exception as error:
            self._has_failed = True
            self._session.report_internal_error("the rerun of a step", error)

    def _judge(self, kept: Optional[_Kept]) -> None:
        """Ends the last step, as its next forward pass would; runs it again if it has spiked, on
        this rank or on another one.
        """
        session = self._session
        has_spiked: Optional[bool] = None
        try:
            if not self._has_failed:
                has_spiked = kept is not None and self._has_spiked(kept)
        finally:
            spiked = of_all_ranks(has_spiked, self._group)
            self._is_over = None in spiked
        if kept is None or self._is_over or not any(spiked):
            return
        with session.lock, session.event_store.lock:
            records = session.event_store.history.all()
        text, cause = self._rerun(kept, records[records["step"] == kept.step], session.sites)
        self._report(kept.step, text, cause)

    def _has_spiked(self, kept: _Kept) -> bool:
        session = self._session
        with session.lock:
            if session.is_closed:
                session.begin_step_if_closed()
            session.flush()
            last = session.step.index
        return any(kind in _SPIKES and kept.step <= step < last for step, kind in self._events())

    @property
    def _group(self) -> Any:
        return self._session.config.training.process_group

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
            monitor._session.event_store.listeners.append(_Recorder(chunks))
            return monitor

        runner = Runner(
            install,
            self._models(),
            self._optimizers(),
            self._scaler(),
            tuple(self._also),
            group=self._group,
        )
        try:
            result = runner.run(kept.function, kept.args, 2, kept.state.put_back, **kept.kwargs)
        except Exception as error:  # the step's own
            text = f"{type(error).__name__}: {first_line(error)}"
            return f"the step was run again from the same state, and failed: {text}", "program"
        if not result.identical:
            first = result.first
            at = "" if first is None else self._of_rank(first.rank)
            where = "" if first is None else f" First that differs{at}: {first}."
            text = f"the step was run {result.runs} times from the same state, with other bits."
            return f"{text}{where} {result.why}", result.cause
        chunks, its_sites = runs[0]
        was, now = _keyed(records, sites), _keyed(np.concatenate(chunks), its_sites)
        firsts = of_all_ranks(_first_difference(was, now), self._group)
        known = [(one[0], rank, one[1]) for rank, one in enumerate(firsts) if one is not None]
        if not known:
            return "run again from the same state, the step has the same numbers", "program"
        _, rank, where = min(known)
        at = self._of_rank(rank)
        text = f"run again twice from the same state, the step has other numbers{at} at {where}"
        is_on_cpu = all(p.is_cpu for model in self._models() for p in model.parameters())
        is_exact = is_on_cpu or torch.are_deterministic_algorithms_enabled()
        return text, "hardware" if is_exact else ""

    def _of_rank(self, rank: int) -> str:
        return f" on rank {rank}" if group_size(self._group) > 1 else ""


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
) -> Optional[tuple[int, str]]:
    """The place of the first tensor that both have, with other numbers; and what they are."""
    for place, (key, record) in enumerate(was.items()):
        other = now.get(key)
        if other is not None and any(
            record[name].tobytes() != other[name].tobytes() for name in _COMPARED
        ):
            sizes = f"abs max {_abs_max(record):.6g} then, {_abs_max(other):.6g} now"
            return place, f"{key[0]}: {sizes}"
    return None


def _abs_max(record: np.void) -> float:
    rows = np.array([record])
    low, high = extreme_values(rows, "min"), extreme_values(rows, "max")
    return float(np.maximum(np.abs(low), np.abs(high))[0])
