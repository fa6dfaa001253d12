"""Runs a module's call a second time at op level, on copies, and observes where its numbers begin.

Copied are its tensors, the parameters, buffers and containers that its modules hold, and the
states of the generators. What the first run made stays as it is, with its graph.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Optional

import numpy as np
import torch
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_map

from fastcheck.calls.module_calls import Call
from fastcheck.monitor.on_request import Install
from fastcheck.monitor.reruns import set_aside
from fastcheck.monitor.session.config import Config
from fastcheck.monitor.session.options import Stop
from fastcheck.monitor.session.passes import Pass
from fastcheck.monitor.session.session import Session
from fastcheck.record.event import GIVEN_NUMBER, UNUSED, Event
from fastcheck.record.format import NONFINITE_COUNTS, Verdict, is_nonfinite
from fastcheck.record.site import Site
from fastcheck.record.statistics import statistics_of
from fastcheck.report.stop_report import MadeBy
from fastcheck.statistics.functions import stats
from fastcheck.utils.torch.flatten import flatten, flatten_arguments, map_tensors
from fastcheck.utils.torch.memory_ref import held_by
from fastcheck.utils.torch.own_operators import unobserved
from fastcheck.utils.torch.readable import can_hold_nonfinite, can_read, has_values, is_materialised
from fastcheck.utils.torch.training_state import Generators
from fastcheck.utils.torch.versions import default_device
from fastcheck.verdict.step import Step

from .stand_ins import replace_lost

# The hooks of the module itself, which have run, or are running.
_HOOKS = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)
# Nobody asked for this backward.
_BACKWARD_HOOKS = ("_backward_hooks", "_backward_pre_hooks")
_COUNTS = ("numel", "nan_count", "posinf_count", "neginf_count", "zero_count")


class RunningCall(NamedTuple):
    """A call that is on this thread's stack."""

    call: Call
    module: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Search(NamedTuple):
    """The step, and the path of the module, of a finding. ``kind``: ``"forward"``, ``"backward"``
    or ``"buffer"``; ``only_neginf``: of the finding; ``parameter``: whose gradient it is.
    """

    step: Step
    path: str
    kind: str
    only_neginf: bool = False
    parameter: str = ""


class FoundAgain(NamedTuple):
    """The event in which the numbers of a second run began, and the path of its module."""

    event: Event
    module: str
    inputs: tuple[tuple[str, np.void], ...]

    @property
    def place(self) -> tuple[str, Optional[str], str]:
        return self.module, self.event.site.op, self.event.line

    @property
    def read_nonfinite(self) -> bool:
        return any(is_nonfinite(record) for _, record in self.inputs)

    @property
    def given(self) -> str:
        """A clause on a number that the operator was given, where that is not finite."""
        return GIVEN_NUMBER if GIVEN_NUMBER in self.event.reason else ""

    @property
    def left_neginf(self) -> str:
        """A clause on -Inf that was written on purpose; empty where it is something else."""
        event = self.event
        is_meant = event.verdict is Verdict.INTENDED
        return f"{event.site.op} left -Inf in its result ({event.reason})" if is_meant else ""

    def made_by(self, how: str) -> MadeBy:
        event = self.event
        is_backward = event.site.direction == "backward"
        return MadeBy(
            event.site.op or "",
            how,
            event.line,
            self.inputs,
            event.record,
            is_backward=is_backward,
            site=replace(event.site, module=self.module),
        )


def observed(
    running: RunningCall,
    session: Session,
    install: Install,
    held: Optional[Pass],
    only_neginf: bool,
    known: Optional[KnownPass] = None,
) -> Optional[FoundAgain]:
    """The place where the numbers of a second run begin; None: nowhere, or it is not ``known``
    again.
    """
    module = running.module
    config = Config(
        overflow_nums=-1,
        level="op",
        sync="never" if is_on_cpu(running) else "call",
        record="stats",
        stop=Stop(protect_weights=False, report=False, find_operator=False),
    )
    generators, is_caching = Generators(), torch.is_autocast_cache_enabled()
    copies, failure = _TensorCopies(), None
    has_parameters = next(module.parameters(), None) is not None
    # A criterion is installed behind a model.
    models = [module] if has_parameters else [torch.nn.Linear(1, 1), module]
    try:
        # Casts of the copies are nobody else's.
        torch.set_autocast_cache_enabled(False)
        with warnings.catch_warnings(), set_aside([module], session), copies.of_modules(module):
            warnings.simplefilter("ignore")
            with unobserved():
                args, kwargs = copies.within((running.args, running.kwargs))
                inside = set(module.modules())  # what is beside them is not copied
                for holder, name, copied in () if held is None else held.buffers:
                    owner = holder()
                    if owner is not None and owner in inside:
                        owner._buffers[name] = copied.clone()
                if known is not None and not known.replace_lost(running, session):
                    return None
                _mend_buffers(module, known is not None and known.kind == "buffer")
            with install(config, models) as monitor:
                # The outermost call began with this state; that of another call is not known.
                state = session.passes.generator if held is None else held.generator
                if state is not None and running.call.parent is None:
                    torch.default_generator.set_state(state)
                with default_device(), contextlib.nullcontext() if known is None else known.modes():
                    try:
                        outputs = module(*args, **kwargs)
                    except Exception as error:
                        # A check of the program's own may have ended the first run, too.
                        if known is not None and known.has_returned:
                            raise
                        failure = error
                    if failure is None and known is not None and not known.run_backward(outputs):
                        return None
            event = _beginning(monitor.events, known, failure is not None)
            if event is None and failure is not None:
                raise failure
            if event is None and only_neginf:
                meant = [e for e in monitor.events if e.verdict is Verdict.INTENDED and e.site.op]
                event = max(meant, key=lambda e: int(e.record["seq"]), default=None)
            if event is None:
                return None
            history = monitor._session.event_store.archive.history
            sites = monitor._session.sites
            inputs = [
                (_named(argument, sites[int(record["site"])], running.call.node.path), record)
                for argument, seq in event.inputs
                if (record := history.find(seq)) is not None
            ]
            part = event.site.module if has_parameters else event.site.module.partition(".")[2]
            part = ".".join(filter(None, (running.call.node.path, part)))
            return FoundAgain(event, part, tuple(inputs))
    finally:
        torch.set_autocast_cache_enabled(is_caching)
        generators.put_back()


def _named(argument: str, source: Site, path: str) -> str:
    """The name of an argument, with the operator that made it or the tensor that is stored under
    this name within the module at ``path``.
    """
    if source.role == "input":
        return argument
    named = replace(source, module=".".join(filter(None, (path, source.module))))
    return f"{argument} ({named.op or named.tensor_name})"


def _beginning(
    events: Sequence[Event], known: Optional[KnownPass], is_cut: bool
) -> Optional[Event]:
    """The event in which it began. ``is_cut``: an exception has left the run, in which nothing was
    made yet of what its check has seen.
    """
    began = [e for e in events if e.counted and e.verdict is Verdict.ORIGIN]
    if known is None or known.kind != "buffer":
        # Nothing in training is made of the statistics that a norm has written.
        began = [e for e in began if e.site.op]
    if is_cut:
        began = began or [e for e in events if e.reason == UNUSED]
    elif known is not None and not began:
        # Nothing was made yet of what is in a buffer, or of a criterion's gradients.
        absorbed = [e for e in events if e.verdict is Verdict.ABSORBED]
        is_late = known.kind == "backward"
        began = [e for e in absorbed if not is_late or e.site.direction == "backward"]
    return min(began, key=lambda e: int(e.record["seq"]), default=None)


def _mend_buffers(module: torch.nn.Module, has_all: bool) -> None:
    """Makes copies finite, so that it shows what makes them non-finite again. ``has_all``: not
    the statistics of norms alone, which the interrupted call may have written.
    """
    parts = (part for part in module.modules() if has_all or isinstance(part, _NormBase))
    with torch.no_grad():
        for buffer in (held for part in parts for held in part.buffers(recurse=False)):
            if can_hold_nonfinite(buffer) and is_materialised(buffer):
                buffer.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


class KnownPass:
    """A finished call, as described by its records. ``seed``: of the numbers in place of weights
    that are lost.
    """

    def __init__(self, held: Pass, session: Session, search: Search, seed: int = 0) -> None:
        self.kind = search.kind
        self.seed = seed
        #: The number of tensors that were replaced.
        self.stand_ins = 0
        #: No record of a weight that is lost is in memory.
        self.is_lost = False
        #: Set by run_backward().
        self.is_same = False
        #: The same, and each output has as many NaN and infinities.
        self.is_exact = False
        #: Weights may have been updated since.
        self.is_over = is_over(held, session)
        self._step = held.step
        kind, dtype = held.autocast
        self._autocast = kind, getattr(torch, dtype.rpartition(".")[2]) if dtype else None
        history = session.event_store.archive.history
        with session.event_store.lock:
            self._outputs = [history.find(tensor_seq) for tensor_seq in held.call.outputs]
            seqs = map(search.step.gradients.get, held.call.outputs)
            self._gradients = [None if seq is None else history.find(seq) for seq in seqs]

    @property
    def has_returned(self) -> bool:
        return bool(self._outputs)

    @property
    def was_finite(self) -> bool:
        return all(r is not None and not is_nonfinite(r) for r in self._outputs)

    def replace_lost(self, running: RunningCall, session: Session) -> bool:
        """Replaces weights of the copy that are lost since; False if that is not possible."""
        if not self.is_over:
            return True
        path = running.call.node.path
        count = replace_lost(running.module, path, self._step, session, self.seed)
        self.stand_ins, self.is_lost = count or 0, count is None
        return not self.is_lost

    @contextlib.contextmanager
    def modes(self) -> Iterator[None]:
        """Sets the modes of autograd and autocast that the call ran in."""
        kind, dtype = self._autocast
        with torch.enable_grad(), torch.autocast(kind, dtype, enabled=dtype is not None):
            yield

    def run_backward(self, outputs: Any) -> bool:
        """Runs the backward of what the second run has returned, if that is asked for. Whether the
        run is the same as the first, as far as is known.
        """
        every = [tensor for _, tensor in flatten(outputs, "") if can_hold_nonfinite(tensor)]
        tensors = [tensor for tensor in every if can_read(held_by(tensor))]
        if len(tensors) != len(self._outputs):
            return False
        with unobserved(), torch.no_grad():
            records = [stats(held_by(tensor.detach())).record for tensor in tensors]
        is_like = _is_like_later if self.is_over else _is_like
        pairs = [(r, now) for r, now in zip(self._outputs, records) if r is not None]
        self.is_same = len(pairs) == len(records) and all(is_like(*pair) for pair in pairs)
        if not self.is_same:
            return False
        self.is_exact = all(r[n] == now[n] for r, now in pairs for n in NONFINITE_COUNTS)
        if self.kind == "backward":
            generator = torch.Generator("cpu").manual_seed(0)
            roots, given = [], []
            for tensor, record in zip(tensors, self._gradients):
                if tensor.requires_grad and record is not None:
                    size = statistics_of(record).rms
                    with unobserved(), torch.no_grad():
                        gradient = torch.empty_like(tensor)
                        held = held_by(gradient)
                        noise = torch.randn(held.shape, generator=generator, device="cpu")
                        held.copy_(noise * (1.0 if size is None else size))
                    roots.append(tensor)
                    given.append(gradient)
            if roots:
                torch.autograd.backward(roots, given)
        return True


def _is_like(known: np.void, now: np.void) -> bool:
    """True if two records are of the same tensor, apart from the order of a sum."""
    if any(known[name] != now[name] for name in _COUNTS):
        return False
    return all(
        np.isclose(known[name], now[name], rtol=1e-3, atol=1e-6, equal_nan=True)
        for name in ("min", "max")
    )


def _is_like_later(known: np.void, now: np.void) -> bool:
    """The same, of weights that are not those of the first run: how many elements are not finite
    may depend on them.
    """
    return known["numel"] == now["numel"] and is_nonfinite(known) == is_nonfinite(now)


def is_over(held: Pass, session: Session) -> bool:
    """True if weights may have been updated since."""
    return held.step < session.step.index or session.step.update.count > 0


def is_on_cpu(running: RunningCall) -> bool:
    arguments = (tensor for _, tensor in flatten_arguments(running.args, running.kwargs))
    return all(tensor.is_cpu for tensor in (*running.module.parameters(), *arguments))


def changed_input(running: RunningCall, session: Session) -> str:
    """The label of an argument that has changed since the call began; empty if there is none."""
    tensors = dict(flatten_arguments(running.args, running.kwargs))
    call = running.call
    for tensor_seq, site in zip(call.inputs, call.input_sites):
        with session.event_store.lock:
            record = session.event_store.archive.history.find(tensor_seq)
        label = session.sites[site].label
        tensor = tensors.get(label)
        if record is None or tensor is None or not can_read(tensor):
            continue
        with unobserved():
            now = stats(tensor.detach()).record
        known = (*_COUNTS, "checksum") if record["checksum"] else _COUNTS
        if any(record[name] != now[name] for name in known):
            return label
    return ""


class _TensorCopies:
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

    def within(self, value: Any) -> Any:
        """The copy of a container, of containers within it and of the tensors that they hold."""
        return map_tensors(value, self.of, functools.partial(tree_map, self.of))

    @contextlib.contextmanager
    def of_modules(self, outermost: torch.nn.Module) -> Iterator[None]:
        """Gives the modules copies of their tensors and containers within a ``with`` statement."""
        held = [(module, dict(vars(module))) for module in outermost.modules()]
        own = [g for _, values in held for g in values.values() if isinstance(g, torch.Generator)]
        states = [generator.get_state() for generator in own]
        try:
            with unobserved():
                for module, values in held:
                    for name, value in values.items():
                        copied = copy.copy(value) if type(value) is set else self.within(value)
                        vars(module)[name] = copied
            for name in _HOOKS:
                vars(outermost)[name] = OrderedDict()
            for module, _ in held:
                for name in _BACKWARD_HOOKS:
                    vars(module)[name] = OrderedDict()
                # The code of module.compile() and of torch.compile(module) is left out: operators
                # of fused code say nothing of the program.
                vars(module)["_compiled_call_impl"] = None
                if "_orig_mod" in module._modules:
                    vars(module)["forward"] = module._orig_mod
            yield
        finally:
            for module, values in held:
                vars(module).clear()
                vars(module).update(values)
            for generator, state in zip(own, states):
                generator.set_state(state)


def _copied(tensor: torch.Tensor) -> Any:
    if not is_materialised(tensor):
        return tensor
    if not has_values(tensor):
        raise RuntimeError("the memory of a tensor that it may read was freed")
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(tensor.detach().clone(), tensor.requires_grad)
    if not tensor.requires_grad:
        return tensor.detach().clone()
    with torch.enable_grad():
        # No leaf: it may be written in place.
        return tensor.detach().requires_grad_().clone()
