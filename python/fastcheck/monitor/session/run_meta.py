"""The log's meta data of a run: options, environment, and optimizer groups at their first step."""

from __future__ import annotations

import contextlib
import math
import numbers
import operator
import re
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Optional, Union

import numpy as np
import torch

from fastcheck.calls.module_calls import ModuleNode
from fastcheck.calls.stored import parameters_of
from fastcheck.errors import ConfigError, LearningRateWarning, first_line
from fastcheck.log.step_table import StepRow
from fastcheck.log.unobserved import UnreadOp, to_meta
from fastcheck.reproducibility.environment import environment_or_error
from fastcheck.reproducibility.inventory import describe_optimizer
from fastcheck.reproducibility.placement import placement
from fastcheck.utils.text.numbers import format_number
from fastcheck.verdict.step import Step

from .config import Config
from .event_store import EventStore, SessionListener

#: The name of a batch.
BatchId = Union[int, str]

_MOST_STEPS = 4096
_MOST_MODULES = 4096
_MOST_CHARACTERS = 200
# The most micro-batches of a step that are named; of more the first and the last.
_MOST_SHOWN = 4


class BatchIds(SessionListener):
    """The names of the batches of a monitor's steps; for any thread. Empty, and without a cost,
    until the first name is given.

    A name is given before the forward pass, when the step that it opens has not begun yet, or with
    ``monitor.step()``. Of several names of a step (micro-batches) all are kept.
    """

    def __init__(self, event_store: EventStore) -> None:
        # The watch asks for names after the event store has been collected with the model.
        self._event_store = weakref.proxy(event_store)
        self._lock = threading.Lock()
        # The names of each step, oldest first, and how many tensors had been read when each was
        # given.
        self._names: OrderedDict[int, list[tuple[BatchId, Optional[int]]]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._names)

    def add(self, step: int, name: BatchId, seq: Optional[int] = None) -> None:
        """The step trains on ``name``. ``seq``: of the next tensor that is read, where ``step`` is
        only what it seems to belong to: a step whose update the loop leaves out is still open then.
        """
        store = self._event_store
        with store.lock:
            if self not in store.listeners:  # the first: the others ask for the name of the step
                store.listeners.insert(0, self)
        with self._lock:
            names = self._names.setdefault(step, [])
            if name not in [batch for batch, _ in names]:
                names.append((name, seq))
            while len(self._names) > _MOST_STEPS:
                self._names.popitem(last=False)
        self._write(step)

    def step_ended(self, step: Step, rows: Sequence[StepRow], chunks: Sequence[np.ndarray]) -> None:
        """Assigns batches that were named after the last tensor of this step to the next step."""
        index, last_seq = step.index, int(chunks[-1]["seq"].max())
        with self._lock:
            names = self._names.get(index, [])
            late = [entry for entry in names if entry[1] is not None and entry[1] > last_seq]
            if not late:
                return
            self._names[index] = [entry for entry in names if entry not in late]
            self._names.setdefault(index + 1, []).extend(late)
        self._write(index + 1)

    def of(self, step: int) -> Optional[BatchId]:
        """The name of a step's batch; several as one text. None: it was given none."""
        if not self._names:
            return None
        with self._lock:
            names = [name for name, _ in self._names.get(step, ())]
        if len(names) < 2:
            return names[0] if names else None
        if len(names) > _MOST_SHOWN:
            return f"{names[0]}, {names[1]}, ..., {names[-1]} ({len(names)} batches)"
        return ", ".join(map(str, names))

    def lines(self) -> list[dict[str, Any]]:
        """Lines as in the log: a step and its batch each, oldest first."""
        with self._lock:
            steps = list(self._names)
        return [{"step": step, "batch": self.of(step)} for step in steps]

    def _write(self, step: int) -> None:
        name, store = self.of(step), self._event_store
        if name is not None:
            with store.lock:
                if store.archive.log is not None:
                    store.archive.log.append_line("batches", {"step": step, "batch": name})


def batch_name(batch_id: Any) -> BatchId:
    """``batch_id`` as it is kept: an int as it is, anything else as a text of at most 200
    characters.

    Raises:
        ConfigError: a tensor of a device, whose value would have to be waited for.
    """
    if isinstance(batch_id, torch.Tensor):
        if not batch_id.is_cpu or batch_id.numel() > _MOST_CHARACTERS:
            what = f"a tensor of {batch_id.numel():,} elements on {batch_id.device}"
            raise ConfigError(f"batch_id can't be used: {what}; give an int or a short text")
        batch_id = batch_id.tolist()
    if isinstance(batch_id, Integral):  # NumPy's too
        return int(batch_id)
    try:
        text = str(batch_id)
    except Exception as error:  # of the object's own
        text = f"{type(batch_id).__name__}, without a text ({first_line(error)})"
    text = " ".join(text.split())
    return text if len(text) <= _MOST_CHARACTERS else text[: _MOST_CHARACTERS - 3] + "..."


# A warm-up's first step, and the end of a schedule, have fewer.
STILL_STEPS = 10

_OPTIONS = ("lr", "weight_decay", "momentum", "betas", "eps")


class Schedule:
    """A schedule of settings: writes a line to the log whenever a setting changes."""

    def __init__(self, event_store: EventStore) -> None:
        self._event_store = event_store
        self._last: dict[str, Any] = {}
        self._rates = _RateWatch(event_store)
        # The options as they were last, by optimizer and group (empty: they may change in place),
        # and the learning rate.
        self._seen: dict[tuple[int, int], tuple[tuple[Any, ...], list[float]]] = {}
        #: A sentence on the first thing seen that an optimizer has stepped with, and at which
        #: training can't work. If it is a learning rate, the class of the optimizer and the rate.
        self.fault = ""
        self.broken: Optional[tuple[str, float]] = None

    def follow(self, step: int, number: int, optimizer: torch.optim.Optimizer) -> None:
        """Looks at the groups of an optimizer that is about to step. Its first values are in the
        meta file.
        """
        rates: list[float] = []
        for group, options in enumerate(optimizer.param_groups):
            values = tuple(map(options.get, _OPTIONS))
            seen = self._seen.get((number, group))
            if seen is None or not (seen[0] and all(map(operator.is_, seen[0], values))):
                group_rates = self._follow_group(step, number, group, optimizer)
                seen = self._seen[number, group] = values if _are_fixed(values) else (), group_rates
            rates += seen[1]

        # A rate that a device has is not known.
        if any(rates) or len(rates) != len(optimizer.param_groups):
            self._rates.moved, self._rates.steps = step, 0
        else:
            self._rates.are_still(step)

    def _follow_group(
        self, step: int, number: int, group: int, optimizer: torch.optim.Optimizer
    ) -> list[float]:
        """The learning rate of the group, as far as it is known."""
        rates: list[float] = []
        kind = type(optimizer).__name__.lower()
        # Divides by the root of a mean of squares.
        is_adam = "adam" in kind and kind != "adamax"
        known = dict(_numbers(optimizer.param_groups[group]))
        if not self.fault:
            # A rate that was below 0 at first is meant.
            before = self._last.get(f"optimizers[{number}].groups[{group}].lr", -1.0)
            self._look_for_fault(step, optimizer, known, before < 0)
        for name, value in known.items():
            if name == "lr":
                rates.append(value)
            full_name = f"optimizers[{number}].groups[{group}].{name}"
            self._note(step, full_name, value, False, is_adam or name == "lr")
        return rates

    def _look_for_fault(
        self, step: int, optimizer: torch.optim.Optimizer, known: Mapping[str, float], ascends: bool
    ) -> None:
        kind = type(optimizer)
        said = _fault(kind.__name__, known, kind.__module__.startswith("torch.optim"), ascends)
        if said:
            self.found_fault(step, optimizer, f"{said}. Look at what sets it")
            if said.startswith("a learning rate"):
                self.broken = kind.__name__, known["lr"]

    def found_fault(self, step: int, optimizer: torch.optim.Optimizer, what: str) -> None:
        """``optimizer`` is about to step with this; the first is kept."""
        if self.fault:
            return
        self.fault = f"{type(optimizer).__name__} has stepped with {what}"
        with self._event_store.lock:
            for listener in self._event_store.listeners:
                listener.noticed(step, "fault", 1, self.fault)

    def clipped(self, step: int, threshold: Any, by_norm: bool) -> None:
        """Gradients were clipped to ``threshold``: by their total norm, or each element."""
        for _, value in _numbers({"lr": threshold}):
            self._note(step, f"clipping.{'threshold' if by_norm else 'value'}", value, True)

    def clipped_scaled(self, threshold: Any) -> None:
        """Gradients were clipped to ``threshold`` while they carried a GradScaler's scale."""
        for _, value in _numbers({"lr": threshold}):
            if "clipping.scaled" not in self._last:  # once is enough
                self._last["clipping.scaled"] = value
                self._tell("clipping.scaled", None, value)

    def _tell(self, name: str, before: Optional[float], value: float) -> None:
        with self._event_store.lock:
            for listener in self._event_store.listeners:
                listener.setting_changed(name, before, value)

    def _note(
        self, step: int, name: str, value: float, logs_first: bool, tells_first: bool = False
    ) -> None:
        is_first = name not in self._last
        if not is_first and self._last[name] == value:
            return
        if not is_first or tells_first:
            self._tell(name, self._last.get(name), value)
        self._last[name] = value
        log = self._event_store.archive.log
        if log is not None and (logs_first or not is_first):
            with self._event_store.lock:
                log.append_line("schedule", {"step": step, "name": name, "value": value})


#: The size of a rate that was lowered to 0 in many parts, each of them rounded.
_ROUNDING = 1e-12


def _fault(name: str, known: Mapping[str, float], is_of_torch: bool, ascends: bool) -> str:
    """The setting of an optimizer's group at which training can't work, and why; empty: none."""
    rate, decay = known.get("lr", 0.0), known.get("weight_decay", 0.0)
    momentum, eps = known.get("momentum", 0.0), known.get("eps", 0.0)
    if not math.isfinite(rate):
        is_nan = math.isnan(rate)
        past = ", or that takes a root of what is below 0 past its end" * is_nan
        return (
            f"a learning rate of {format_number(rate)}, as a schedule gives that divides "
            f"{'0 ' * is_nan}by 0 where its warm-up or decay has no steps{past}"
        )
    if not is_of_torch:
        return ""
    if rate < -_ROUNDING and not ascends:
        return (
            f"a learning rate of {format_number(rate)}, as a schedule gives that goes on past its "
            "end: below 0 updates go the other way"
        )
    betas = (known.get("betas[0]", 0.0), 0.0 if name == "Adamax" else known.get("betas[1]", 0.0))
    beta = next((beta for beta in betas if not 0 <= beta < 1), None) if "Ada" in name else None
    if beta is not None:
        return (
            f"a beta of {beta:.9g}: it has to be at least 0 and below 1, as {name} divides by "
            "1 - beta ** step"
        )
    if not eps >= 0:
        return f"an eps of {format_number(eps)}: below 0 it may make a divisor 0, or negative"
    if not abs(momentum) <= 1:
        return (
            f"a momentum of {momentum:.9g}: it has to be below 1, as above that the velocity grows "
            "by itself"
        )
    if decay < 0:
        return f"a weight decay of {format_number(decay)}: below 0 it makes weights grow"
    # The decay of other classes is a part of a gradient that they divide by its size.
    if name in ("AdamW", "SGD") and rate * decay >= 1:
        return (
            f"a weight decay of {format_number(decay)} at a learning rate of "
            f"{format_number(rate)}: with a product of 1 the decay takes each weight to 0 in "
            "one update, and with one above 2 farther from 0 than it was"
        )
    return ""


class _RateWatch:
    """Counts the steps in a row in which every learning rate is 0, and warns of many."""

    def __init__(self, event_store: EventStore) -> None:
        self._event_store = event_store
        self._is_done = False
        #: The last step in which one was not 0, and the steps since then in which all were.
        self.moved, self.steps = -1, 0
        self._last = -1
        self._since = 0

    def are_still(self, step: int) -> None:
        """An optimizer steps, whose learning rates are all 0."""
        if self._is_done or step in (self.moved, self._last):
            return
        self._since = self._since if self.steps else step
        self.steps += 1
        self._last = step
        if self.steps > STILL_STEPS:  # in the last of these another optimizer might move something
            self._is_done = True
            when = f"has been 0 since step {self._since:,}: no weight moves any more"
            if self.moved < 0:
                when = f"was 0 in the first {STILL_STEPS} steps: no weight has moved"
            text = f"the learning rate of every parameter group {when}"
            self._event_store.warn_later(text, LearningRateWarning)


def _are_fixed(values: Sequence[Any]) -> bool:
    """True if these are numbers, and groups of them, that are what they are."""
    for value in values:
        for part in value if type(value) is tuple else (value,):
            if not (part is None or (type(part) in (float, int, bool) and part == part)):
                return False
    return True


def _numbers(options: dict[str, Any]) -> Iterator[tuple[str, float]]:
    for name in _OPTIONS:
        value = options.get(name)
        if isinstance(value, (tuple, list)):
            parts = [(f"{name}[{place}]", part) for place, part in enumerate(value)]
        else:
            parts = [(name, value)]
        for label, part in parts:
            # Reading a tensor on a device would make the host wait.
            if isinstance(part, torch.Tensor):
                part = part.item() if part.is_cpu and part.numel() == 1 else None
            # The ABC's own check is slow.
            if isinstance(part, (float, numbers.Real)) and not isinstance(part, bool):
                yield label, float(part)


def first_meta(config: Config, nodes: Sequence[ModuleNode]) -> dict[str, Any]:
    """The contents of a log's meta file when the monitor is installed."""
    made = config.to_meta()
    made["environment"] = environment_or_error()
    made["placement"] = _placement(nodes)
    made["modules"] = _attributes(nodes)
    return made


def _attributes(nodes: Sequence[ModuleNode]) -> dict[str, dict[str, Any]]:
    """The class of each module and its attributes that are numbers, and of torch's own modules the
    texts, None and groups of numbers too, by path: eps, p, reduction, training.
    """
    made = {}
    for node in nodes[:_MOST_MODULES]:
        module = node.module()
        is_torch = type(module).__module__.startswith("torch.nn.")
        kinds = (bool, int, float, str, type(None)) if is_torch else (bool, int, float)
        found: dict[str, Any] = {"class": node.type_name}  # no attribute has such a name
        for name, value in vars(module).items() if module is not None else ():
            parts = value if is_torch and type(value) is tuple else (value,)
            is_plain = all(type(part) in kinds and part == part for part in parts)
            if is_plain and not name.startswith("_"):
                found[name] = list(value) if type(value) is tuple else value
        made[node.path] = found
    return made


def _states_of(optimizer: torch.optim.Optimizer) -> list[Mapping[str, Any]]:
    """The states of its parameters that hold something."""
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    states = (optimizer.state.get(parameter) or {} for parameter in parameters)
    return [state for state in states if any(value is not None for value in state.values())]


def _beginning(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state that an optimizer has before its first step here: of how many parameters, and the
    smallest and the largest step count, where these are numbers on the host.
    """
    states = _states_of(optimizer)
    made: dict[str, Any] = {
        "parameters": sum(len(group["params"]) for group in optimizer.param_groups),
        "with_state": len(states),
    }
    counts = [number for state in states for _, number in _numbers({"lr": state.get("step")})]
    if counts:
        made["steps"] = [min(counts), max(counts)]
    if states:
        made["keeps"] = True  # else the next step tells
    return made


def _placement(nodes: Sequence[ModuleNode]) -> dict[str, Any]:
    roots = (node.module() for node in nodes if node.is_root)
    return placement(module for module in roots if module is not None)


_NORM = re.compile(r"(?:Batch|Group|Instance|Layer|RMS)Norm")


@dataclass(eq=False)
class RunMeta:
    """Gathers what goes into the meta file. Costs nothing until it is written. ``compiled``: the
    modules that ran inside torch.compile, by index; what runs there adds them. ``modules``: all
    modules of the models, by path, as long as they live.
    """

    _config: Config
    _nodes: Sequence[ModuleNode]
    _event_store: EventStore
    _compiled: Mapping[int, object]
    _modules: Mapping[str, torch.nn.Module]

    def __post_init__(self) -> None:
        #: The options that leave something unread.
        self.left_out_by = self._config.left_out_by
        self._optimizers: list[dict[str, Any]] = []
        #: The state that each of these began from.
        self._states: list[dict[str, Any]] = []
        self._met: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = (
            weakref.WeakKeyDictionary()
        )
        self.schedule = Schedule(self._event_store)
        #: The batches that each step trains on, where the training loop names them.
        self.batches = BatchIds(self._event_store)
        self._compiled_count = 0

    def to_dict(self, unread: Sequence[UnreadOp]) -> dict[str, Any]:
        """The meta data known so far, ready for JSON. ``unread``: the tensors that op level could
        not observe.
        """
        made = first_meta(self._config, self._nodes)
        if self._optimizers:
            made |= {"optimizers": self._optimizers, "optimizer_states": self._states}
        if self._compiled:
            made["compiled_modules"] = len(self._compiled)
        if self._config.level == "op":
            made |= to_meta(unread)
        return made

    def silent_norms(self, path: str) -> tuple[str, ...]:
        """The norms beside this module, or beside a module that it lies in, of which no call was
        seen, though a call of the module that holds them is over; the nearest first.
        """
        if self._compiled:  # what runs there may be seen by nobody
            return ()
        nodes = {node.path: node for node in self._nodes}
        norms = [node for node in self._nodes if node.path and _NORM.search(node.type_name)]
        names: list[str] = []
        while path:
            path = path.rpartition(".")[0]
            beside = [node for node in norms if node.path.rpartition(".")[0] == path]
            holder = nodes.get(path) if beside else None
            # The last of its calls may be under way.
            if holder is not None and holder.total_calls > 1:
                silent = (node for node in beside if node.enabled and not node.total_calls)
                names += [f"{node.path} ({node.type_name})" for node in silent]
        return tuple(names)

    def learning_rates(self) -> tuple[tuple[str, float], ...]:
        """The learning rate of each group of the optimizers that have stepped, by class; no number
        on a device. If a rate was not finite or below 0, that rate alone.
        """
        if self.schedule.broken is not None:
            return (self.schedule.broken,)
        rates = [
            (type(optimizer).__name__, float(group["lr"]))
            for optimizer in self._met
            for group in optimizer.param_groups
            if isinstance(group.get("lr"), (int, float))
        ]
        return tuple(dict.fromkeys(rates))

    def never_updated(self) -> dict[str, int]:
        """The parameters that no optimizer holds that has stepped, if any of these hold others of
        the model: the number of elements of each, by its key.
        """
        groups = [group["params"] for optimizer in self._met for group in optimizer.param_groups]
        held = {id(parameter) for group in groups for parameter in group}
        own = {(n.path, name): p for n, name, p in parameters_of(self._nodes, None)}
        if held.isdisjoint(map(id, own.values())):
            return {}
        left = [(place, p) for place, p in own.items() if id(p) not in held]
        return {".".join(filter(None, place)): p.numel() for place, p in left}

    def held_by_optimizer(self, key: str) -> Optional[tuple[torch.optim.Optimizer, torch.Tensor]]:
        """The parameter of this key, with the optimizer that holds it and has stepped."""
        for node, name, parameter in parameters_of(self._nodes, None):
            if ".".join(filter(None, (node.path, name))) == key:
                for optimizer in self._met:
                    held = (p for group in optimizer.param_groups for p in group["params"])
                    if any(p is parameter for p in held):
                        return optimizer, parameter
        return None

    def at_step_boundary(self, optimizer: torch.optim.Optimizer, step: int) -> bool:
        """An optimizer is about to step: the first time, its groups are written down. Returns
        whether it is the first. Never raises: a group that can't be described is worth no run.
        """
        compiled = len(self._compiled)
        if compiled != self._compiled_count:
            self._compiled_count = compiled
            self._add(compiled_modules=compiled)
        number = self._met.get(optimizer)
        if number is not None:
            self.schedule.follow(step, number, optimizer)
            if number < len(self._states) and "keeps" not in self._states[number]:
                self._states[number]["keeps"] = bool(_states_of(optimizer))
                self._add(optimizer_states=self._states)
            return False
        number = self._met[optimizer] = len(self._optimizers)
        self.schedule.follow(step, number, optimizer)
        try:
            # Modules that include= and exclude= leave out are in these, too.
            names = {
                id(p): ".".join(filter(None, (path, name)))
                for path, module in self._modules.items()
                for name, p in module._parameters.items()
            }
            parameters = parameters_of(self._nodes, None)
            names.update((id(p), node.name_of(name)) for node, name, p in parameters)
            self._optimizers.append(describe_optimizer(optimizer, names))
        except Exception as error:
            self._optimizers.append({"type": type(optimizer).__name__, "error": str(error)})
        with contextlib.suppress(Exception):
            if len(self._states) == number:
                self._states.append(_beginning(optimizer))
        # Wrapped or sharded since install(), it may hold another part of the model.
        self._add(
            optimizers=self._optimizers,
            optimizer_states=self._states,
            placement=_placement(self._nodes),
        )
        return True

    def _add(self, **fields: Any) -> None:
        with self._event_store.lock:
            if self._event_store.archive.log is not None:
                self._event_store.archive.log.add_meta(**fields)
