"""StepRunner: runs a step several times from the same state, and decides what the runs show. Rerun:
what came of it, as data and as text.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Callable, Optional

import numpy as np
import torch

from fastcheck.errors import UnsupportedTensorError, first_line, printable
from fastcheck.log.step_table import StepRow
from fastcheck.monitor.hooks import optimizers as optimizer_hooks
from fastcheck.monitor.session.config import Config
from fastcheck.monitor.session.event_store import SessionListener
from fastcheck.monitor.session.options import Stop, Training
from fastcheck.monitor.session.session import Session
from fastcheck.record.format import Depth, Flag, nonfinite
from fastcheck.record.site import Site, SiteTable
from fastcheck.record.statistics import extreme_values
from fastcheck.statistics.functions import stats
from fastcheck.utils.grouping import grouped
from fastcheck.utils.torch.flatten import flatten
from fastcheck.utils.torch.rank import group_size, of_all_ranks, own_rank
from fastcheck.utils.torch.sharding import local
from fastcheck.utils.torch.training_state import TrainingState
from fastcheck.utils.torch.versions import GradScaler
from fastcheck.verdict.step import Step

from .on_request import Install

#: Names a tensor: its site, the call, and how many of the same came before.
_Key = tuple[Site, int, int]

_NAMED = 5
_STEPS = {
    "forward": "in the forward pass",
    "backward": "in the backward pass",
    "optimizer": "in what the optimizer was given",
    "after": "after the step",
}


@dataclass(frozen=True)
class Difference:
    """A tensor that is not the same in two runs of a step.

    ``site``: its place. ``call``: which call of the module or operator, counted from 0. ``phase``:
    ``"forward"``, ``"backward"``, ``"optimizer"`` (gradients and weights as the optimizer was given
    them) or ``"after"`` (what the step left). ``place``: how many tensors of the run come before
    it. ``rank``: whose tensor it is. ``run``: the number of the run, from 1, that differs from run
    1. ``values``: what was read of it in both runs: ``checksum``, ``abs_max``, ``nonfinite``; None
    where the run has no such tensor.
    """

    site: Site
    call: int
    phase: str
    place: int
    rank: int
    run: int
    values: tuple[Optional[dict[str, Any]], Optional[dict[str, Any]]]

    @property
    def is_input(self) -> bool:
        """True if it is what the model was given."""
        return self.site.role == "input" and self.site.module == ""

    def to_json(self) -> dict[str, Any]:
        """The fields by name, ready for JSON."""
        return {**vars(self), "site": self.site.to_dict()}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Difference:
        """The inverse of to_json(), after JSON."""
        first, other = fields["values"]
        return cls(**{**fields, "site": Site.from_dict(fields["site"]), "values": (first, other)})

    def __str__(self) -> str:
        call = f", call {self.call}" if self.call else ""
        first, other = self.values
        if first is None or other is None:
            which = 1 if other is None else self.run
            detail = f"only run {which} has it"
        elif first["checksum"] != other["checksum"]:
            detail = f"checksum {first['checksum']:016x} in run 1, {other['checksum']:016x} in run "
            detail += f"{self.run}; abs max {first['abs_max']:.6g} and {other['abs_max']:.6g}"
        else:
            detail = f"{first['numel']} elements in run 1, {other['numel']} in run {self.run}"
        return printable(f"{self.site}{call}: {detail}")


@dataclass(frozen=True)
class Rerun:
    """The result of fastcheck.rerun(); ``str()`` of it is a report.

    ``runs``: how often this rank ran the step. ``tensors``: how many tensors of the first run were
    compared. ``differences``: those of this rank, the earliest first, of the runs that are not the
    majority. ``first``: the earliest difference of all ranks, in the order of the program.
    ``odd_runs``: the numbers, from 1, of the runs of that rank that differ from most others; empty
    if no two runs are equal. ``is_each_time``: no two are. ``cause``: ``""`` (identical),
    ``"hardware"``, ``"program"``, ``"input"`` (the step was given other data) or ``"unknown"``.
    ``why``: the reason for the cause. ``errors``: runs that raised, by number, with the error.
    """

    identical: bool
    runs: int
    tensors: int
    first: Optional[Difference]
    differences: tuple[Difference, ...]
    odd_runs: tuple[int, ...]
    is_each_time: bool
    cause: str
    why: str
    rank: int
    ranks: int
    errors: tuple[tuple[int, str], ...] = ()
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        where = f" on each of {self.ranks} ranks" if self.ranks > 1 else ""
        if self.identical:
            lines = [
                f"The step was run {self.runs} times from the same state{where}: {self.tensors:,} "
                "tensors, all with the same bits.",
                "What is wrong with this step is the program or its data, unless the machine "
                "computes the same wrong bits each time.",
            ]
            return "\n".join([*lines, *self.notes])
        lines = [f"The step was run {self.runs} times from the same state{where}, with other bits."]
        if self.first is not None:
            of_rank = f"on rank {self.first.rank}, " if self.ranks > 1 else ""
            lines.append(f"First that differs, {of_rank}{_STEPS[self.first.phase]}: {self.first}")
        lines += [f"Run {number} raised {error}" for number, error in self.errors]
        if self.is_each_time:
            lines.append("No two runs are equal: it comes back each time.")
        elif self.odd_runs:
            odd = ", ".join(map(str, self.odd_runs))
            others = self.runs - len(self.odd_runs)
            lines.append(f"It came in run {odd}; the other {others} are equal.")
        lines.append(f"Cause: {self.cause}. {self.why}")
        own = [difference for difference in self.differences if difference != self.first]
        if own:
            lines.append(f"Also, on rank {self.rank}:" if self.ranks > 1 else "Also:")
            lines += [f"  {difference}" for difference in own[:_NAMED]]
            if len(own) > _NAMED:
                lines.append(f"  and {len(own) - _NAMED:,} more")
        return "\n".join([*lines, *self.notes])


class Trace:
    """The trace of one run: the records of its results. ``error``: the exception that it raised."""

    def __init__(self) -> None:
        self.error = ""
        self._rows: dict[_Key, np.void] = {}
        self._seen: Counter[tuple[Site, int]] = Counter()
        self._phases: dict[_Key, str] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def add_records(self, records: np.ndarray, sites: SiteTable) -> None:
        """Adds the records of the monitor that observed the run."""
        again = (records["flags"] & int(Flag.RECOMPUTE)) != 0
        for record in records[(records["depth"] >= Depth.FULL) & ~again]:
            site = sites[int(record["site"])]
            self._add(site, int(record["call"]), record, site.direction)

    def add_tensors(self, named: Iterable[tuple[Site, torch.Tensor]]) -> None:
        """Adds the tensors that the run has left behind. Waits for their devices."""
        for pairs in grouped(named, lambda pair: pair[1].device).values():
            records: Iterable[Optional[np.void]]
            try:
                records = stats([tensor for _, tensor in pairs]).numpy()
            except UnsupportedTensorError:  # one of them: the others are read
                records = [_record_of(tensor) for _, tensor in pairs]
            for (site, _), record in zip(pairs, records):
                if record is not None:
                    self._add(site, 0, record, "after")

    def _add(self, site: Site, call: int, record: np.void, phase: str) -> None:
        key = site, call, self._seen[site, call]
        self._seen[site, call] += 1
        self._rows[key], self._phases[key] = record, phase

    @property
    def content(self) -> dict[_Key, tuple[int, int, int]]:
        """The content that has to be the same in two runs."""
        return {key: _bits(record) for key, record in self._rows.items()}

    def difference(self, key: _Key, place: int, other: Trace, run: int) -> Difference:
        """``other``: run number ``run``, in which this tensor is another."""
        first, second = self._rows.get(key), other._rows.get(key)
        phase = self._phases.get(key) or other._phases[key]
        return Difference(key[0], key[1], phase, place, 0, run, (_values(first), _values(second)))


def differences_between(first: Trace, other: Trace, run: int) -> list[Difference]:
    """The tensors that are not the same in the first run and in run number ``run``, in the order of
    the first; then those that only the other has.
    """
    known, seen = first.content, other.content
    # A tensor that only the other has comes where it came there, before those that it has moved
    # back.
    places = {key: (place, 1) for place, key in enumerate(known)}
    for place, key in enumerate(seen):
        places.setdefault(key, (place, 0))
    keys = [key for key in places if known.get(key) != seen.get(key)]
    keys.sort(key=places.__getitem__)
    return [first.difference(key, places[key][0], other, run) for key in keys]


def stored_tensors(
    models: Sequence[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer], returned: object
) -> list[tuple[Site, torch.Tensor]]:
    """The tensors that a step leaves: what it returned, gradients, the state of the optimizers,
    weights and buffers.
    """
    tensors: list[tuple[Site, torch.Tensor]] = []

    def add(role: str, label: str, value: object, kind: str) -> None:
        if isinstance(value, torch.Tensor):
            tensors.append((Site("", kind, "optimizer", role, 0, label), local(value)))

    for name, tensor in flatten(returned, "returned"):
        tensors.append((Site("", "step", "forward", "output", 0, name), local(tensor)))
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
    return tensors


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


_MOST_DIFFERENCES = 100


@dataclass(eq=False)
class _Recorder(SessionListener):
    """Keeps what the monitor of a run has read."""

    _trace: Trace
    _sites: SiteTable

    def step_ended(self, step: Step, rows: Sequence[StepRow], chunks: Sequence[np.ndarray]) -> None:
        self._trace.add_records(np.concatenate(chunks), self._sites)


@dataclass(frozen=True)
class StepRunner:
    """``also``: what else has a state. ``deterministic``: all runs use torch's deterministic
    algorithms.
    """

    install: Install
    models: Sequence[torch.nn.Module]
    optimizers: Sequence[torch.optim.Optimizer] = ()
    scaler: Optional[GradScaler] = None
    also: Sequence[Any] = ()
    level: str = "module"
    deterministic: bool = False
    group: Any = None

    def run(self, step: Callable[..., Any], args: tuple[Any, ...], runs: int) -> Rerun:
        traces: list[Trace] = []
        with self._state(args) as state, set_aside(self.models):

            def go() -> Trace:
                state.put_back()
                # The error of the first run is the step's own.
                return self._trace(step, args, state, is_first=not traces)

            with _deterministic(self.deterministic):
                for _ in range(runs):
                    traces.append(go())
                is_same = [_equal(traces[0], trace) for trace in traces]
                if runs == 2 and not all(self._of_ranks(all(is_same))):
                    traces.append(go())
            others, first = _compare(traces, own_rank())
            own = None if first is None else first.to_json()
            rows = self._of_ranks((own, _odd_runs(traces), not _equal_pair(traces)))
            firsts = [(d and Difference.from_json(d), tuple(odd), pair) for d, odd, pair in rows]
            known = [difference for difference, _, _ in firsts if difference is not None]
            # The difference of the lower rank counts, of two in one place.
            first_difference = min(known, key=lambda d: (d.place, d.rank), default=None)
            errors = tuple((n + 1, t.error) for n, t in enumerate(traces) if t.error)
            is_identical = not known and not any(self._of_ranks(bool(errors)))
            result = Rerun(
                identical=is_identical,
                runs=len(traces),
                tensors=len(traces[0]),
                first=first_difference,
                differences=tuple(others[:_MOST_DIFFERENCES]),
                odd_runs=_odd_runs(traces),
                is_each_time=not is_identical and not _equal_pair(traces),
                cause="",
                why="",
                rank=own_rank(),
                ranks=group_size(self.group),
                errors=errors,
            )
            if is_identical:
                return result
            # The same for all ranks, so that they decide the same.
            _, odd, each_time = next(of for of in firsts if of[0] == first_difference)
            result = replace(result, odd_runs=odd, is_each_time=each_time)
            cause, why = self._cause(result, go)
        return replace(result, cause=cause, why=why)

    def _state(self, args: tuple[Any, ...]) -> TrainingState:
        tensors = [tensor for _, tensor in flatten(args, "batch")]
        return TrainingState(
            self.models,
            self.scaler,
            optimizers=self.optimizers,
            others=self.also,
            tensors=[tensor for tensor in tensors if not tensor.is_inference()],
        )

    def _trace(
        self, step: Callable[..., Any], args: tuple[Any, ...], state: TrainingState, is_first: bool
    ) -> Trace:
        trace, returned = Trace(), None
        config = Config(
            overflow_nums=-1,
            level=self.level,
            stop=Stop(protect_weights=False, report=False),
            training=Training(scaler=self.scaler),
        )
        monitor = self.install(config, self.models)
        monitor._session.event_store.listeners.append(_Recorder(trace, monitor.sites))
        with monitor:
            try:
                returned = step(*args)
            except Exception as error:
                if is_first:
                    raise
                trace.error = f"{type(error).__name__}: {first_line(error)}"
        trace.add_tensors(stored_tensors(self.models, state.optimizers, returned))
        return trace

    def _of_ranks(self, value: Any) -> list[Any]:
        return of_all_ranks(value, self.group)

    def _cause(self, result: Rerun, go: Callable[[], Trace]) -> tuple[str, str]:
        if result.first is not None and result.first.is_input:
            return (
                "input",
                "The model was given other data: the step draws some of it by itself. Give what it "
                "takes in as an argument, or what it is drawn from in also=.",
            )
        if not result.is_each_time:
            is_on_cpu = all(p.is_cpu for model in self.models for p in model.parameters())
            is_set = self.deterministic or torch.are_deterministic_algorithms_enabled()
            if is_on_cpu or is_set:
                return "hardware", "A result that is not there again is a fault of the machine."
            return (
                "unknown",
                "Either a fault of the machine, or a kernel that adds in any order: "
                "rerun(deterministic=True) leaves only the first.",
            )
        if self.deterministic:
            return "unknown", _UNKNOWN
        with _deterministic(True):
            is_same = _equal(go(), go())
        if all(self._of_ranks(is_same)):
            return (
                "program",
                "With torch.use_deterministic_algorithms(True) the runs are equal: the program "
                "uses kernels whose results depend on timing.",
            )
        return "unknown", _UNKNOWN


_UNKNOWN = (
    "Either the machine computes wrongly each time, or the step depends on what is not put back: a "
    "generator or a counter of its own (give it in also=), the time, another thread."
)


@contextlib.contextmanager
def set_aside(models: Sequence[torch.nn.Module], own: Optional[Session] = None) -> Iterator[None]:
    """Sets the monitors of these models, and ``own``, aside within a ``with`` statement: they read
    and count nothing.
    """
    owned = {id(parameter) for model in models for parameter in model.parameters()}
    sessions = [
        watcher.session
        for watcher in optimizer_hooks.watchers
        if watcher.session is own or any(id(p) in owned for p in watcher.parameters())
    ]
    with contextlib.ExitStack() as stack:
        for session in sessions:
            stack.enter_context(session.aside())
        yield


@contextlib.contextmanager
def _deterministic(wanted: bool) -> Iterator[None]:
    if not wanted:
        yield
        return
    was = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    cudnn: Any = torch.backends.cudnn
    flags = cudnn.deterministic, cudnn.benchmark
    # An operator without such a kernel runs as it does without this.
    torch.use_deterministic_algorithms(True, warn_only=not was or warns)
    cudnn.deterministic, cudnn.benchmark = True, False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was, warn_only=warns)
        cudnn.deterministic, cudnn.benchmark = flags


def _equal(first: Trace, other: Trace) -> bool:
    return first.content == other.content and first.error == other.error


def _kinds(traces: Sequence[Trace]) -> list[int]:
    """The number, for each run, of the first that is equal to it."""
    return [next(n for n, other in enumerate(traces) if _equal(other, trace)) for trace in traces]


def _equal_pair(traces: Sequence[Trace]) -> bool:
    return len(set(_kinds(traces))) < len(traces)


def _odd_runs(traces: Sequence[Trace]) -> tuple[int, ...]:
    """The numbers, from 1, of those that are not like most; empty if no two are equal."""
    kinds = _kinds(traces)
    (most, count), *_ = Counter(kinds).most_common()
    return tuple(n + 1 for n, kind in enumerate(kinds) if kind != most) if count > 1 else ()


def _compare(traces: Sequence[Trace], rank: int) -> tuple[list[Difference], Optional[Difference]]:
    """The differences of the first run from those that are not equal to it, of the run with the
    earliest difference; and the first of these.
    """
    differences: list[Difference] = []
    for number, trace in enumerate(traces[1:], 2):
        these = differences_between(traces[0], trace, number)
        if these and (not differences or these[0].place < differences[0].place):
            differences = these
    differences = [replace(difference, rank=rank) for difference in differences]
    return differences, differences[0] if differences else None
