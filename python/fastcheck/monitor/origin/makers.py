"""Finds the operator that made the numbers of a stop, from what is still in memory."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Callable, Optional

import torch

from fastcheck.calls.module_calls import Call, outermost_of
from fastcheck.monitor.hooks.optimizers import watchers
from fastcheck.monitor.on_request import Install
from fastcheck.monitor.session.derivatives import FUNCTION, SavedByNode
from fastcheck.monitor.session.passes import Pass
from fastcheck.monitor.session.run_meta import RunMeta
from fastcheck.monitor.session.session import Session
from fastcheck.record.event import CHANGED_BY_LOOP, NEVER_FINITE
from fastcheck.record.format import Verdict
from fastcheck.record.site import Site
from fastcheck.report.stop_report import MadeBy
from fastcheck.utils.torch.rank import group_size
from fastcheck.utils.torch.readable import waits_untold
from fastcheck.utils.torch.transforms import is_transformed
from fastcheck.verdict.findings import Finding
from fastcheck.verdict.step import Step

from . import call_again, written_lines
from .kept_graph import search_derivatives, search_operators
from .loss_graph import search_graph
from .second_run import Search
from .update_state import search_state
from .variables import search_argument, search_variables

_FORWARD = frozenset(("input", "output", "loss"))
_GRADIENTS = frozenset(("grad_input", "grad_output", "param_grad"))


class Makers:
    """Finds the operator that made the numbers of a stop. Holds a weak reference to its session.
    Called outside all locks, in the thread that is about to raise the stop.
    """

    def __init__(
        self, session: Session, install: Install, memory: Callable[[], set[int]], meta: RunMeta
    ) -> None:
        self._session = weakref.ref(session)
        self._install = install
        self._memory = memory
        self._meta = meta

    def __call__(self, culprit: Finding, step: Step) -> Optional[MadeBy]:
        """Returns the operator, or None where no graph and no call is left to look in."""
        with waits_untold():
            made = self._found(culprit, step)
        return None if made is None else written_lines.with_lines(made)

    def _found(self, culprit: Finding, step: Step) -> Optional[MadeBy]:
        session = self._session()
        if session is None or session.tape is not None:
            return None
        site, is_now = session.sites[culprit.site], step is session.step
        if session.config.level == "op":
            return _at_op_level(culprit, site, is_now)
        if culprit.uses.given is not None:
            given = culprit.uses.given()
            return None if given is None or not is_now else search_graph(given, site.key)
        if culprit.role == "param" and culprit.verdict is Verdict.ARRIVED:
            return self._of_parameter(culprit, site) if is_now else None
        if culprit.role in _FORWARD:
            if culprit.role == "input" and culprit.verdict is Verdict.ARRIVED:
                return _of_argument(culprit, site, session, is_now)
            return self._of_forward(culprit, step, session)
        if culprit.reason.startswith(CHANGED_BY_LOOP):
            lines = written_lines.lines_of_gradients() if is_now else ()
            how = "The program's code writes to gradients."
            return MadeBy("", how, written=lines) if lines else None
        return self._of_gradient(culprit, step, session)

    def _of_forward(self, culprit: Finding, step: Step, session: Session) -> Optional[MadeBy]:
        """The operator that made what a forward or a loss has returned."""
        again = self._again(culprit, step, session) if culprit.only_neginf else None
        if again is not None and again.operator:
            return again  # in the graph of the loss a -Inf may be a mask
        roots = session.backwards.roots if step is session.step else ()
        made = next((m for root in roots if (m := search_graph(root)) is not None), None)
        if made is not None and (made.operator or culprit.role == "loss"):
            return made
        again = again or self._again(culprit, step, session)
        if again is not None and again.operator:
            return again
        if culprit.verdict is Verdict.ORIGIN and made is None:
            # A model may return its loss.
            is_model = culprit.call is not None and culprit.call.parent is None
            is_one = is_model and culprit.role == "output" and culprit.record["numel"] == 1
            is_loss = culprit.role == "loss" or is_one
            kept = session.backwards.derivatives
            frames = tuple(kept.frames(step.index))
            made = search_operators(kept.of(step.index), frames, is_sure=not is_loss)
        return made or again

    def _of_parameter(self, culprit: Finding, site: Site) -> Optional[MadeBy]:
        """The variable that a weight was written from, or else the write that broke it."""
        written = "the weight may have been written from it"
        # Another name of a weight is none that it was written from.
        made = search_variables(culprit.record, written, self._memory())
        return made or self._of_write(culprit, site.key)

    def _of_write(self, culprit: Finding, key: str) -> Optional[MadeBy]:
        """Looks for the write that broke a parameter, in the optimizer's state of it and in lines
        of the program.
        """
        if culprit.reason.startswith(NEVER_FINITE):
            return None
        held = self._meta.held_by_optimizer(key)
        if held is None:
            lines = written_lines.lines_of_weights(key.rpartition(".")[2])
            how = "The program's code writes to tensors in place."
            return MadeBy("", how, written=lines) if lines else None
        written = written_lines.lines_of_update(held[0])
        made = search_state(*held, key)
        if made is None and written:
            made = MadeBy("", f"{type(held[0]).__name__} is an optimizer of the program's own.")
        return None if made is None else replace(made, written=written)

    def _of_gradient(self, culprit: Finding, step: Step, session: Session) -> Optional[MadeBy]:
        """The operator behind a gradient, or behind a buffer that its module made non-finite."""
        is_gradient = culprit.role in _GRADIENTS
        if culprit.verdict is not Verdict.ORIGIN or not (is_gradient or culprit.role == "buffer"):
            return None
        graphs = session.backwards.derivatives.of(step.index) if is_gradient else ()
        known = search_derivatives(graphs)
        # A gradient between two modules is that of an output, and is blamed on the module that read
        # the output.
        site = session.sites[culprit.blamed.site]
        kind = "backward" if is_gradient else "buffer"
        parameter = site.key if site.role == "param_grad" else ""
        search = Search(step, site.module, kind, parameter=parameter)
        made = self._pass_again(culprit, site, search, session)
        made = made if made is not None and (made.operator or known is None) else known
        if parameter and (made is None or not made.operator):
            made = self._of_hook(site.key) or made
        if is_gradient and (made is None or not made.operator):
            made = _of_function(graphs) or made
        return made

    def _of_hook(self, key: str) -> Optional[MadeBy]:
        """The hook of the program on this parameter, which returns its gradient."""
        held = self._meta.held_by_optimizer(key)
        lines = () if held is None else written_lines.lines_of_hooks(held[1])
        how = f"{key} has a hook of the program (register_hook), which may return its gradient."
        return MadeBy("", how, written=lines) if lines else None

    def _pass_again(
        self, culprit: Finding, site: Site, search: Search, session: Session
    ) -> Optional[MadeBy]:
        """Runs finished calls again to find the operator. Returns the reason if none is found."""
        said: Optional[MadeBy] = None
        if group_size(None) > 1 or not _may_run_again(session):
            return None
        for held in _passes_of(culprit, site, session):
            made = call_again.run_pass_again(held, search, session, self._install)
            if made is not None and made.operator:
                return made
            said = said or made
        return said

    def _again(self, culprit: Finding, step: Step, session: Session) -> Optional[MadeBy]:
        call = culprit.call
        if culprit.role == "input":  # made by the parent, between its submodules
            call = None if call is None else call.parent
        if culprit.verdict is not Verdict.ORIGIN or not _may_run_again(session):
            return None
        is_forward = torch._C._current_graph_task_id() == -1 and step is session.step
        running = call_again.running_call(call) if is_forward else None
        if running is None or _has_run_since(running.call, step):
            if call is None:
                return None
            site = session.sites[culprit.site]
            search = Search(step, call.node.path, "forward", culprit.only_neginf)
            return self._pass_again(culprit, site, search, session)
        if group_size(None) > 1:
            return MadeBy(
                "",
                f"{running.call.node.name} was not run again: several ranks train together, and "
                "one alone may leave the others waiting.",
            )
        return call_again.run_again(running, session, self._install, culprit.only_neginf)


def _of_function(graphs: Sequence[Sequence[SavedByNode]]) -> Optional[MadeBy]:
    """The autograd.Function of the program near the loss, whose backward may have made it."""
    nodes = (node for graph in graphs for node in graph)
    for function in dict.fromkeys(node.values.get(FUNCTION) for node in nodes):
        if function is not None and (lines := written_lines.lines_of_backward(function)):
            how = f"{function.__name__}, in the graph of the loss, has a backward of its own."
            return MadeBy("", how, written=lines)
    return None


def _at_op_level(culprit: Finding, site: Site, is_now: bool) -> Optional[MadeBy]:
    """The variable, or the argument, that holds what an operator or a model was given: the
    operator that made anything else is known.
    """
    if not site.op:
        given = call_again.running_argument(site) if culprit.is_data else None
        return None if given is None else search_argument(given, site.label)
    if culprit.verdict is not Verdict.ARRIVED or not is_now:
        return None
    # A number that stands alone is like many others.
    is_many = culprit.record["numel"] > 1
    made = search_variables(culprit.record, "it may be this one") if is_many else None
    applied = written_lines.function_at(culprit.uses.line) if made is None else ""
    how = f"The line applies {applied}, an autograd.Function: what its forward computes in NumPy, "
    how += "or in an extension, is no operator of torch."
    return MadeBy("", how) if applied else made


def _of_argument(culprit: Finding, site: Site, session: Session, is_now: bool) -> Optional[MadeBy]:
    """The operator, or the variable, that an argument comes from."""
    held = session.passes.held
    if not is_now and not any(run.call is culprit.call for run in held):
        return None
    given = call_again.argument_of(culprit.call, site.label, held)
    if given is None:
        return None
    made = None if given.grad_fn is None else search_graph(given, site.label)
    return made or search_argument(given, site.label)


def _may_run_again(session: Session) -> bool:
    """True if a call may run again: not where the whole step does, or within a transform of
    torch.func. Nor where other monitors may wait, with Python's lock, for the lock under which the
    operators of a second run are read, while that run waits for the device.
    """
    is_off = session.config.runs_again or is_transformed()
    return not is_off and not (session.rings.is_deferred and sum(1 for _ in watchers) > 1)


def _has_run_since(call: Call, step: Step) -> bool:
    """True if its module was called after this call began: it is the later call that runs."""
    return any(c.node is call.node and c.first_seq > call.first_seq for c in list(step.calls))


def _passes_of(finding: Finding, site: Site, session: Session) -> Iterator[Pass]:
    """The passes in which the finding may have been made, the oldest first."""
    call, held = finding.call, session.passes.held
    if call is None:  # a tensor that a module stores
        for run in held:
            node = run.call.node.path
            if not node or f"{site.module}.".startswith(f"{node}."):
                yield run
        return
    outermost = outermost_of(call)
    # The gradient of what the model returned is made outside of it.
    if site.role == "grad_output" and set(call.outputs) & set(outermost.outputs):
        return
    yield from (run for run in held if run.call is outermost)
