"""Runs a module's call again at op level, to find the operator and the line.

The stop is raised within the call, so its arguments are on the stack. The call runs on copies: of
its tensors, of the parameters, buffers and containers that its modules hold, and of the states of
the generators. What it made the first time stays as it is, with its graph.
"""

from __future__ import annotations

import contextlib
import copy
import sys
import warnings
from collections import OrderedDict, deque
from collections.abc import Iterator
from types import FrameType
from typing import Any, NamedTuple, Optional

import torch
from torch.utils._pytree import tree_map

from fastcheck.calls.module_calls import Call
from fastcheck.errors import first_line
from fastcheck.monitor.session.config import Config
from fastcheck.monitor.session.options import Filter, Log, Stop, Training
from fastcheck.monitor.session.session import Session
from fastcheck.record.event import Event
from fastcheck.record.format import Verdict
from fastcheck.report.stop_report import MadeBy
from fastcheck.statistics.functions import stats
from fastcheck.utils.torch.flatten import flatten_arguments
from fastcheck.utils.torch.own_operators import unobserved
from fastcheck.utils.torch.readable import can_read, is_materialised
from fastcheck.utils.torch.training_state import Generators

from .reruns import Install, set_aside

_CALL = torch.nn.Module._call_impl.__code__
# Those of the module itself have run, or are running.
_HOOKS = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_backward_hooks",
    "_backward_pre_hooks",
)


class RunningCall(NamedTuple):
    """A call that is on this thread's stack."""

    call: Call
    module: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def running_call(call: Optional[Call]) -> Optional[RunningCall]:
    """``call`` itself, or the innermost one around it, that runs on this thread's stack."""
    frames = {id(frame.f_locals["self"]): frame for frame in _outermost_first(_call_frames())}
    while call is not None:
        module = call.node.module()
        frame = frames.get(id(module))
        if frame is not None and module is not None and not call.is_recompute:
            values = frame.f_locals
            return RunningCall(call, module, values["args"], values["kwargs"])
        call = call.parent
    return None


def bad_element(call: Optional[Call], label: str) -> Optional[MadeBy]:
    """Where in the batch its first NaN or Inf is, of the argument with this label of a call that is
    running; None where it is not on this thread's stack.
    """
    running = running_call(call)
    if running is None:
        return None
    batch = dict(flatten_arguments(running.args, running.kwargs)).get(label)
    if batch is None or batch.dim() == 0 or not can_read(batch):
        return None
    with unobserved(), torch.no_grad():
        bad = (~torch.isfinite(batch.detach())).nonzero()
    if not len(bad):
        return None
    first, rows = bad[0].tolist(), set(bad[:, 0].tolist())
    most = f"{len(rows):,} of {len(batch):,} rows hold{'s' if len(rows) == 1 else ''} NaN or Inf"
    return MadeBy(
        "",
        f"The first bad element of {label} is {first}, in row {first[0]:,} of the batch: {most}.",
    )


def _call_frames() -> Iterator[FrameType]:
    frame: Optional[FrameType] = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _CALL:
            yield frame
        frame = frame.f_back


def _outermost_first(frames: Iterator[FrameType]) -> list[FrameType]:
    return list(frames)[::-1]


def run_again(running: RunningCall, session: Session, install: Install) -> MadeBy:
    """Runs the call again, with its inputs and the same modes of autograd and autocast. What the
    modules and their hooks do beyond that (a print, a counter elsewhere) happens once more.
    """
    name = running.call.node.name
    changed = _changed_input(running, session)
    if changed:
        return MadeBy("", f"{name} could not be run again: {changed} was written in place since.")
    try:
        # The outermost call began with this state; that of another one is not known.
        generator = session.pass_generator if running.call.parent is None else None
        monitor, event = _observed(running, install, generator)
    except Exception as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        return MadeBy("", f"{name} could not be run again: {reason}")
    if event is None:
        return MadeBy(
            "",
            f"{name} was run again on its inputs, and no operator in it could be named: it may "
            "depend on random numbers, or on what has changed since.",
        )
    history = monitor._session.event_store.history
    inputs = [(argument, history.find(seq)) for argument, seq in event.inputs]
    part = ".".join(filter(None, (running.call.node.path, event.site.module)))
    within = f" in {part}" if part != running.call.node.path else ""
    return MadeBy(
        event.site.op or "",
        f"{event.site.op}{within} made it, from finite values: {name} was run again on its "
        "inputs, operator by operator.",
        event.line,
        tuple((argument, record) for argument, record in inputs if record is not None),
        event.record,
    )


def _changed_input(running: RunningCall, session: Session) -> str:
    """The label of an argument that is not what it was when the call began; empty if there is
    none.
    """
    tensors = dict(flatten_arguments(running.args, running.kwargs))
    call = running.call
    for token, site in zip(call.inputs, call.input_sites):
        with session.event_store.lock:
            record = session.event_store.history.find(token)
        label = session.sites[site].label
        tensor = tensors.get(label)
        if record is None or tensor is None or not can_read(tensor):
            continue
        with unobserved():
            now = stats(tensor.detach()).record
        names = ("numel", "nan_count", "posinf_count", "neginf_count", "zero_count", "checksum")
        known = names if record["checksum"] else names[:-1]
        if any(record[one] != now[one] for one in known):
            return label
    return ""


def _observed(
    running: RunningCall, install: Install, generator: Optional[torch.Tensor]
) -> tuple[Any, Optional[Event]]:
    """The monitor that has observed the call, and the event in which its numbers began."""
    module = running.module
    config = Config(
        overflow_nums=-1,
        level="op",
        sync="call" if any(not p.is_cpu for p in module.parameters()) else "never",
        record="stats",
        log_dir=None,
        include=None,
        exclude=None,
        every=1,
        filter=Filter(),
        stop=Stop(protect_weights=False, report=False, find_operator=False),
        log=Log(None),
        training=Training(),
    )
    generators, is_caching = Generators(), torch.is_autocast_cache_enabled()
    copies = _Copies()
    try:
        # Casts of the copies are nobody else's.
        torch.set_autocast_cache_enabled(False)
        with warnings.catch_warnings(), set_aside([module]), copies.of_modules(module):
            warnings.simplefilter("ignore")
            with unobserved():
                args, kwargs = tree_map(copies.of, (running.args, running.kwargs))
            with install(config, [module]) as monitor:
                if generator is not None:
                    torch.default_generator.set_state(generator)
                module(*args, **kwargs)
            began = [e for e in monitor.events if e.counted and e.verdict is Verdict.ORIGIN]
            return monitor, min(began, key=lambda e: int(e.record["seq"]), default=None)
    finally:
        torch.set_autocast_cache_enabled(is_caching)
        generators.put_back()


class _Copies:
    """Copies of tensors and of what holds them; of one tensor always the same."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, Any]] = {}

    def of(self, value: Any) -> Any:
        """A tensor's copy; anything else as it is."""
        if not isinstance(value, torch.Tensor):
            return value
        known = self._known.get(id(value))
        if known is None:
            # The original is kept: another object might have its address.
            known = self._known[id(value)] = value, _copied(value)
        return known[1]

    @contextlib.contextmanager
    def of_modules(self, outermost: torch.nn.Module) -> Iterator[None]:
        """Within it the modules hold copies of their tensors and containers."""
        held = [(module, dict(vars(module))) for module in outermost.modules()]
        own = [g for _, values in held for g in values.values() if isinstance(g, torch.Generator)]
        states = [generator.get_state() for generator in own]
        try:
            with unobserved():
                for module, values in held:
                    vars(module).update({name: self._held(v) for name, v in values.items()})
            for name in _HOOKS:
                vars(outermost)[name] = OrderedDict()
            yield
        finally:
            for module, values in held:
                vars(module).clear()
                vars(module).update(values)
            for generator, state in zip(own, states):
                generator.set_state(state)

    def _held(self, value: Any) -> Any:
        if type(value) in (dict, OrderedDict):
            return type(value)((key, self.of(one)) for key, one in value.items())
        if type(value) in (list, tuple):
            return type(value)(map(self.of, value))
        return copy.copy(value) if type(value) in (set, deque) else self.of(value)


def _copied(tensor: torch.Tensor) -> Any:
    if not is_materialised(tensor):
        return tensor
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(tensor.detach().clone(), tensor.requires_grad)
    if not tensor.requires_grad:
        return tensor.detach().clone()
    with torch.enable_grad():
        # No leaf: it may be written in place.
        return tensor.detach().requires_grad_().clone()
