"""Finds the operator and the line by running a module's call again.

Of a call that a stop interrupts the arguments are on the stack; a call from outside is held by the
session until its step is over, and its backward may run again, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Callable, Optional, Union

import torch

from fastcheck.calls.module_calls import Call, outermost_of
from fastcheck.errors import first_line
from fastcheck.monitor.on_request import Install
from fastcheck.monitor.session.passes import Pass
from fastcheck.monitor.session.session import Session
from fastcheck.record.format import Verdict, is_nonfinite
from fastcheck.record.site import Site
from fastcheck.report.stop_report import MadeBy
from fastcheck.utils.torch.flatten import flatten_arguments
from fastcheck.utils.torch.frames import PAST, call_frames
from fastcheck.utils.torch.readable import can_read
from fastcheck.utils.torch.versions import is_compiled
from fastcheck.verdict.step import Step

from .second_run import (
    FoundAgain,
    KnownPass,
    RunningCall,
    Search,
    changed_input,
    is_on_cpu,
    is_over,
    observed,
)

# The most runs with other numbers in place of weights that are lost.
_MOST_SEEDS = 4
# The most bytes of the parameters and buffers that are copied.
_MOST_BYTES = 2 << 30


def running_call(call: Optional[Call]) -> Optional[RunningCall]:
    """``call`` itself, or the innermost call around it, that runs on this thread's stack."""
    frames = list(call_frames())
    while call is not None:
        module, outer = call.node.module(), call.parent
        # Each call of a module that calls itself has a frame.
        inner_first = [f for f in frames if f.f_locals["self"] is module]
        depth = 1
        while outer is not None:
            depth += outer.node is call.node
            outer = outer.parent
        if module is not None and len(inner_first) >= depth and not call.is_recompute:
            values = inner_first[-depth].f_locals
            return RunningCall(call, module, values["args"], values["kwargs"])
        call = call.parent
    return None


def argument_of(call: Optional[Call], label: str, passes: Sequence[Pass]) -> Optional[torch.Tensor]:
    """The argument of the call with this label; None where the call is neither on this thread's
    stack nor among ``passes``, or where the argument can't be read.
    """
    held = next((run for run in passes if run.call is call), None)
    argument = None if held is None else _argument(held.args, held.kwargs, label)
    running = running_call(call)
    live = None if running is None else _argument(running.args, running.kwargs, label)
    # The held tensor has no graph; the call that runs may be a later call of the module.
    is_later = live is None or (argument is not None and live.data_ptr() != argument.data_ptr())
    return argument if is_later else live


def _argument(args: Any, kwargs: Any, label: str) -> Optional[torch.Tensor]:
    argument = dict(flatten_arguments(args, kwargs)).get(label)
    return None if argument is None or not can_read(argument) else argument


def running_argument(site: Site) -> Optional[torch.Tensor]:
    """The argument of a model that is running on this thread, of which no call is known."""
    for frame in reversed(list(call_frames())):
        values = frame.f_locals
        if type(values["self"]).__name__ == site.module_type:
            return _argument(values["args"], values["kwargs"], site.label)
    return None


def run_again(
    running: RunningCall, session: Session, install: Install, only_neginf: bool
) -> MadeBy:
    """Runs the call again, with its inputs and the same modes of autograd and autocast. What the
    modules and their hooks do beyond that (a print, a counter elsewhere) happens once more.
    ``only_neginf``: of what was found.
    """
    name, outermost = running.call.node.name, outermost_of(running.call)
    held = next((run for run in session.passes.held if run.call is outermost), None)

    def find() -> Optional[FoundAgain]:
        return observed(running, session, install, held, only_neginf)

    outcome = _attempt(running, session, find)
    if isinstance(outcome, MadeBy):
        return outcome
    if outcome is None:
        return MadeBy(
            "",
            f"{name} was run again on its inputs, and no operator in it could be named: it may "
            "depend on random numbers, or on what has changed since.",
        )
    part = outcome.module
    within = f" in {part}" if part != running.call.node.path else ""
    what = f"it, from finite values{outcome.given}"
    what = "NaN or Inf in addition to those that it read" if outcome.read_nonfinite else what
    how = outcome.left_neginf or f"{outcome.event.site.op}{within} made {what}"
    how += f": {name} was run again on its inputs, {_as_eager(running.call)}."
    return outcome.made_by(how)


def run_pass_again(
    held: Pass, search: Search, session: Session, install: Install
) -> Optional[MadeBy]:
    """Runs a call that is over again, to find the first operator that makes non-finite numbers of
    finite numbers. None: none does, the call is not the same again, or what it needs is gone.
    """
    module = held.call.node.module()
    if module is None:
        return None
    is_within = torch._C._current_graph_task_id() != -1
    running = RunningCall(held.call, module, held.args, held.kwargs)
    if is_within and not is_on_cpu(running):
        return None  # the device's thread of autograd is waiting for this
    runs = _Runs(held, search, running, session, install)
    # A module that is called within a backward would seem to be recomputed.
    with ThreadPoolExecutor(1) as elsewhere:
        there = (lambda: elsewhere.submit(runs.find).result()) if is_within else runs.find
        found = _attempt(running, session, there)
    if not isinstance(found, FoundAgain):
        return found
    if not found.event.site.op:
        return None  # a statistic that a norm has written, and no operator that wrote it
    since = ", with the weights that it has now" if is_over(held, session) else ""
    since = _WITH_STAND_INS if runs.has_stand_ins else since
    if search.kind == "backward":
        what = _of_backward(found, search, session, held.call.node.name, since)
    else:
        what = _of_forward(found, search, held.call, since)
    within = f"In {found.module}: " if found.module != held.call.node.path else ""
    return None if what is None else found.made_by(f"{within}{what}")


def _of_forward(found: FoundAgain, search: Search, call: Call, since: str) -> Optional[str]:
    """Tells what was found in a forward; None if it is not what is searched for."""
    is_inside = not search.path or found.module.startswith(f"{search.path}.")
    is_there = found.module == search.path or (is_inside and search.kind == "forward")
    is_origin = found.event.verdict is Verdict.ORIGIN
    if not is_there or (found.read_nonfinite and not found.left_neginf and not is_origin):
        return None
    what = "in addition to those that it read" if found.read_nonfinite else "of finite values"
    made = found.left_neginf or f"{found.event.site.op} made NaN or Inf {what}{found.given}"
    return f"{made}. {call.node.name} was run again on its inputs, {_as_eager(call)}{since}."


def _of_backward(
    found: FoundAgain, search: Search, session: Session, name: str, since: str
) -> Optional[str]:
    """The same of a backward."""
    event, reason = found.event, found.event.reason.partition(";")[0]
    is_of_parameter = (
        event.site.direction == "forward"
        and search.parameter != ""
        and event.reason.endswith(f"the gradient of {search.parameter}")
    )
    if not is_of_parameter and _had_finite_gradients(found.module, search.step, session):
        return None  # random gradients did it, or a random state
    if event.verdict is Verdict.ABSORBED:
        if found.read_nonfinite:
            return None
        reason = f"everything that it read was finite{found.given}"
    if not reason.startswith("aten."):
        backward = "'s backward" if event.site.direction == "backward" else ""
        reason = f"{event.site.op}{backward} made it: {reason}"
    return (
        f"{reason}. {name} was run again on its inputs, forward and backward, with random "
        f"gradients of the size that they had{since}."
    )


@dataclass
class _Runs:
    """Runs a call that is over again; more than once where weights of it are lost, with other
    random numbers in place of these.
    """

    held: Pass
    search: Search
    running: RunningCall
    session: Session
    install: Install
    has_stand_ins: bool = False

    def find(self) -> Optional[FoundAgain]:
        """The finding of a run; where weights may have been updated since, that of all runs, if the
        pass before that was healthy is healthy again.
        """
        runs: list[tuple[Optional[FoundAgain], bool]] = []
        for seed in range(_MOST_SEEDS):
            known = KnownPass(self.held, self.session, self.search, seed)
            found = observed(
                self.running, self.session, self.install, self.held, self.search.only_neginf, known
            )
            self.has_stand_ins |= known.stand_ins > 0
            if not known.is_over:
                return found
            # Other numbers may be too small, or too large, to do what these did.
            if known.is_same:
                runs.append((found, known.is_exact))
            if len(runs) > 1 or not known.stand_ins:
                break
        # Two runs must do the same, and none of it to what was healthy.
        if len(runs) <= self.has_stand_ins:
            return None
        found, other = runs[0][0], runs[-1][0]
        if found is None or other is None or other.place != found.place:
            return None
        is_healthy = self._is_healthy_before()
        if is_healthy is None:
            is_healthy = all(is_exact for _, is_exact in runs)
        return found if is_healthy else None

    def _is_healthy_before(self) -> Optional[bool]:
        """True if the module's last pass of an earlier step runs again as it ran, and nothing is
        found in it. None: there is none, or its weights are lost.
        """
        node, passes = self.held.call.node, self.session.passes.held
        earlier = [run for run in passes if run.step < self.held.step and run.call.node is node]
        if not earlier:
            return None
        before = earlier[-1]
        known = KnownPass(before, self.session, self.search._replace(kind="forward"))
        call = RunningCall(before.call, self.running.module, before.args, before.kwargs)
        is_changed = bool(changed_input(call, self.session))
        found = (
            None if is_changed else observed(call, self.session, self.install, before, False, known)
        )
        is_healthy = known.was_finite and known.is_same and found is None
        return None if known.is_lost else is_healthy


# The program is elsewhere by then.
PAST.add(_Runs.find.__code__)

_WITH_STAND_INS = (
    ", with random numbers of the size that they had, and as many zeros, in place of those of its "
    "weights and buffers that are NaN or Inf now: the numbers shown are of that run"
)


def _as_eager(call: Call) -> str:
    """Tells how a call ran again: fused code may round otherwise than its operators one by one."""
    module = call.node.module()
    was_compiled = call.node.ran_compiled or (module is not None and is_compiled(module))
    return "operator by operator" + (", without torch.compile" if was_compiled else "")


def _had_finite_gradients(path: str, step: Step, session: Session) -> bool:
    """True if the gradients that this module has passed on in the step are known to be finite."""
    gradients, history = step.gradients, session.event_store.archive.history
    with session.event_store.lock:
        seqs = [
            gradients.get(tensor_seq)
            for call in step.calls
            if call.node.path == path
            for tensor_seq in call.inputs
        ]
        records = [r for seq in seqs if seq is not None and (r := history.find(seq)) is not None]
    return bool(records) and not any(map(is_nonfinite, records))


def _attempt(
    running: RunningCall, session: Session, find: Callable[[], Optional[FoundAgain]]
) -> Union[FoundAgain, MadeBy, None]:
    """The result of ``find``, which runs the call again, or the reason why that was not
    possible.
    """
    name = running.call.node.name
    try:
        reason = _why_not(running, session)
        return MadeBy("", f"{name} {reason}.") if reason else find()
    except Exception as error:
        kind, line = type(error).__name__, first_line(error)
        reason = kind if line == kind else f"{kind}: {line}"
        return MadeBy("", f"{name} could not be run again: {reason}")


def _why_not(running: RunningCall, session: Session) -> str:
    """The reason why the call is not run again; empty if it can be."""
    module = running.module
    size = sum(t.numel() * t.element_size() for t in (*module.parameters(), *module.buffers()))
    if size > _MOST_BYTES:
        return (
            f"was not run again: a copy of its parameters and buffers would take "
            f"{size / 2**30:,.1f} GiB, more than {_MOST_BYTES >> 30} GiB"
        )
    changed = changed_input(running, session)
    return f"could not be run again: {changed} was written in place since" if changed else ""
