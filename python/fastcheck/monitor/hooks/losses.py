"""Losses: read where backward() is called on them, or given to monitor.step().

Each call of backward() adds a part to the loss of its step, whoever has read the tensor before.
The parts before it count no more if their gradients were thrown away: a parameter that had a
gradient when the first of them was back-propagated has none, the closure of a step is evaluated
again, or the first of them was interrupted.
"""

from __future__ import annotations

import dataclasses
import math
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from numbers import Real
from typing import Any, Optional

import torch

from fastcheck.calls.module_calls import ModuleNode
from fastcheck.calls.recorder import HookRecorder
from fastcheck.calls.stored import parameter_at
from fastcheck.errors import ConfigError
from fastcheck.extension import status
from fastcheck.monitor.session.session import Session
from fastcheck.record.format import Flag
from fastcheck.record.site import GIVEN_LOSS, GRAD_LOSS, SCALED_LOSS, Site
from fastcheck.utils.torch.flatten import flatten
from fastcheck.utils.torch.memory_ref import MemoryRef, held_by, memory_ref
from fastcheck.utils.torch.own_operators import unobserved
from fastcheck.utils.torch.readable import can_hold_nonfinite, can_read
from fastcheck.verdict.step import Step

from .state_reader import StateReader

# A graph is searched so far for a parameter; those of the last layers are a few nodes away.
_MAX_NODES = 2000
# After this many graphs without a parameter, of another model perhaps, only a few nodes are met.
_MOST_FRUITLESS = 16
_FEW_NODES = 64
_SCALED = int(Flag.SCALED)

#: A parameter, as parameter_at() finds it.
_Place = tuple[ModuleNode, str]
#: A loss, as a tensor without a graph; its place among those of one call; what it is called.
_Loss = tuple[torch.Tensor, int, str]


class _Backward:
    """A call of backward() at losses that were not read yet: in their graph no parameter of the
    model was found.
    """

    __slots__ = ("gradient_count", "is_ours", "losses", "parameter", "scale", "step")

    def __init__(self, step: Step, parameter: Optional[_Place]) -> None:
        self.step = step
        # A parameter of this model that was found in its graph. None: not of backward(), or none
        # was found.
        self.parameter = parameter
        self.gradient_count = len(step.gradients)
        self.is_ours = False
        self.losses: list[_Loss] = []
        #: A scale of the program's own that its last loss was multiplied by; None: none was found.
        self.scale: Optional[float] = None


class _RunningBackward(threading.local):
    """The backward that this thread runs."""

    backward: Optional[_Backward] = None


class LossReader:
    """Reads the losses of a session: the tensors that backward() is called on, or the ``loss=`` of
    monitor.step(). Every method expects the session's lock to be held.
    """

    def __init__(self, session: Session, state: StateReader) -> None:
        self._session = session
        self._numbers = state.numbers
        self._parameters = _Parameters(state)
        self._running = _RunningBackward()
        # Losses in a row in whose graph no parameter was found.
        self._fruitless = 0
        #: Set by StepWatcher: a step whose forward pass is among the records of the step before.
        self.forward_step: Optional[Step] = None
        # Tensors that a scaler returned, by id(): the memory of each, and the loss that it was made
        # from.
        self._scaled: dict[int, tuple[MemoryRef, torch.Tensor]] = {}
        # A step whose loss may be made of derivatives that carry the scale, and left the range.
        self._of_scaled: Optional[Step] = None
        #: The loss of the open step: the step's number, and a parameter that the first of the parts
        #: since the last update has given a gradient. None once an optimizer has used it.
        self.first_part: Optional[tuple[int, _Place]] = None
        self._is_anew = False
        # The tensors that the last backward() began at.
        self._last: list[MemoryRef] = []
        # The sites of losses, by place and label.
        self._sites: dict[tuple[int, str], int] = {}

    # backward()

    def lead_to_model(
        self, roots: Sequence[torch.Tensor], inputs: Optional[Sequence[torch.Tensor]] = None
    ) -> bool:
        """True if a parameter is found in the graphs of ``roots``, or what a module has made of
        other parameters that it was given (torch.func.functional_call). ``inputs``: of
        autograd.grad(), which is asked for gradients of parameters, or of as many tensors of their
        shapes. Nobody else changes these graphs: they are about to be used here.
        """
        if inputs is not None:
            is_asked = self._parameters.find(inputs, self._session.step.index)
            if is_asked or not self._parameters.have_shapes_of(inputs):
                return is_asked
        is_rare = self._fruitless >= _MOST_FRUITLESS
        most = _FEW_NODES if is_rare else _MAX_NODES
        step = None if is_rare else self._session.step.index
        has_recorded = False
        for root in roots:
            leaves = _leaves_of(root, most, self._session.recorder)
            if self._parameters.find(leaves, step):
                return True
            has_recorded |= leaves.has_recorded
        self._fruitless += not has_recorded
        return has_recorded

    def began(
        self,
        roots: Sequence[torch.Tensor],
        gradients: Sequence[Optional[torch.Tensor]],
        inputs: Optional[Sequence[torch.Tensor]],
        leads_to_model: bool,
    ) -> bool:
        """backward() begins at ``roots``, with these ``gradients`` where it was given any.
        ``inputs``: of autograd.grad(), which is that of a loss only where it is asked for gradients
        of parameters. Whether it is known to be this model's.
        """
        session = self._session
        interrupted, self._running.backward = self._running.backward, None
        if interrupted is not None and interrupted.step is session.step:
            # It has raised, and its part counts no more; those before it are known by a gradient.
            self._is_anew |= self.first_part is None
        is_ours = session.config.level == "op" or leads_to_model
        if not is_ours and session.backwards.is_foreign:
            return False
        scaled = self._scaled
        if inputs is None:
            self._scaled = {}
        is_new = session.next_seq == session.step.first_seq
        if (
            session.is_closed
            or not session.is_active
            or (is_new and not leads_to_model and session.step is not self.forward_step)
        ):
            return False
        if inputs is not None and not leads_to_model:
            return False
        is_grad = inputs is not None
        parameter = self._parameters.found if leads_to_model and not is_grad else None
        backward = self._running.backward = _Backward(session.step, parameter)
        for position, root in enumerate(roots):
            before = scaled.get(id(root)) if scaled else None
            loss = before[1] if before is not None and before[0].is_of(root) else root
            if loss.numel() != 1 or not can_hold_nonfinite(loss):
                continue
            held = loss if can_read(loss) else _replicated(loss)
            if held is not None:
                is_own_scaled = session.config.training.has_own_scale and loss is root
                name = GRAD_LOSS if is_grad else SCALED_LOSS if is_own_scaled else "loss"
                gradient = gradients[position] if position < len(gradients) else None
                # Reading it here keeps no graph.
                value = held if is_ours else _without_graph(held)
                value = value if gradient is None else _times(held, gradient)
                is_product = type(root.grad_fn).__name__ == "MulBackward0"
                if is_product and loss is root and name == "loss":
                    backward.scale = _constant_scale(root)
                    if backward.scale is not None:
                        with unobserved():
                            value = value.detach() / backward.scale
                backward.losses.append((value, position, name))
        backward.is_ours = is_ours
        if backward.is_ours:
            self._read_roots(backward)
            backward.losses = []  # a backward() that raises does not hold their graph
        return backward.is_ours

    def ended(self, was_alone: bool) -> bool:
        """The backward of this thread is over. Whether it was this model's. ``was_alone``: the
        gradients that have come since it began are from it.
        """
        backward = self._running.backward
        if backward is None:
            return False
        if self.first_part is None and backward.parameter is not None:
            parameter = parameter_at(*backward.parameter)
            # Some optimizers keep gradients elsewhere, and never leave any here.
            if parameter is not None and parameter.grad is not None:
                self.first_part = backward.step.index, backward.parameter
        self._running.backward = None
        is_unknown = not backward.is_ours and was_alone
        if is_unknown and len(backward.step.gradients) > backward.gradient_count:
            # Gradients came by a node that hides its graph (checkpointing), or into a parameter
            # that stands for the model's (FSDP's).
            backward.is_ours = self._session.step is backward.step
            if backward.is_ours:
                self._read_roots(backward)
        return backward.is_ours

    def derived(
        self, roots: Sequence[torch.Tensor], results: Sequence[Optional[torch.Tensor]]
    ) -> None:
        """autograd.grad() has returned these. Those of what a GradScaler has made carry the scale
        until the program divides by it: a loss of them that is not finite is no fault, where the
        scaler skips the update.
        """
        made = (known[0] for root in roots if (known := self._scaled.get(id(root))) is not None)
        if any(ref.is_of(root) for ref in made for root in roots):
            with_graph = [t for t in results if t is not None and t.grad_fn is not None]
            if any(map(_may_be_nonfinite, with_graph)):
                self._of_scaled = self._session.step

    def evaluated_again(self) -> None:
        """The closure of a step makes other gradients than it has made in this step."""
        self._is_anew = True

    def scaled(self, outputs: Any, results: Any) -> None:
        """A GradScaler has made ``results`` of ``outputs``."""
        for loss, result in zip(_tensors(outputs), _tensors(results)):
            # The graph of the loss is that of the result.
            self._scaled[id(result)] = memory_ref(result), _without_graph(loss)

    def _read_roots(self, backward: _Backward) -> None:
        session, training = self._session, self._session.config.training
        if not session.level.reads_numbers:
            return
        if training.has_own_scale:
            scaler: Any = training.scaler
            self._numbers.loss_scale(scaler() if callable(scaler) else scaler)
        elif backward.scale is not None:
            self._numbers.loss_scale(backward.scale)
        may_be_anew = self._is_anew or self.first_part is not None
        flags = int(Flag.ANEW) if may_be_anew and self._begins_anew(backward) else 0
        if backward.losses:
            self._last = []
        for loss, position, name in backward.losses:
            self._last.append(memory_ref(loss))
            label = name if position == 0 else f"{name}[{position}]"
            flags |= _SCALED if name == SCALED_LOSS else 0
            self._read(loss, position, label, flags)
            flags = 0
        if backward.losses and session.rings.settles_calls:
            session.settle_call()

    # monitor.step()

    def given(self, loss: Any) -> None:
        """Reads what monitor.step(loss=) was given: a tensor, a number, or a structure of
        tensors.
        """
        if isinstance(loss, Real):
            loss = torch.tensor(float(loss), dtype=torch.float64, device="cpu")
        last, self._last = self._last, []
        for position, (label, tensor) in enumerate(flatten(loss, GIVEN_LOSS)):
            if not can_hold_nonfinite(tensor) or not can_read(tensor):
                continue
            if not any(known.is_of(tensor) for known in last):
                self._read(tensor, position, label)

    def _begins_anew(self, backward: _Backward) -> bool:
        """True if the gradients of the parts before this part were thrown away. Those of a model
        that this backward is not known to lead to may be in use by another thread.
        """
        is_anew, self._is_anew = self._is_anew, False
        if self.first_part is not None and backward.parameter is not None:
            step, place = self.first_part
            parameter = parameter_at(*place)
            is_anew |= parameter is None or parameter.grad is None
            if is_anew or step != self._session.step.index:
                self.first_part = None
        return is_anew

    def _read(self, loss: torch.Tensor, position: int, label: str, flags: int = 0) -> None:
        session = self._session
        site = self._sites.get((position, label))
        if site is None:
            made = Site("", "", "forward", "loss", position, label)
            site = self._sites[position, label] = session.sites.intern(made)
        is_scaled = flags & _SCALED != 0 or self._of_scaled is session.step
        session.level.read_loss(loss, site, flags, is_scaled)


class _Parameters:
    """The parameters of the observed modules."""

    def __init__(self, state: StateReader) -> None:
        self._state = state
        self._known: dict[int, _Place] = {}
        self._step = -1
        #: The parameter that find() has found last.
        self.found: Optional[_Place] = None

    def find(self, tensors: Iterable[torch.Tensor], step: Optional[int]) -> bool:
        """True if one of ``tensors``, of this step, is one of them. None: parameters that the model
        has got since are not looked for.
        """
        missed = []
        self.found = None
        for tensor in tensors:
            place = self._known.get(id(tensor))
            if place is not None and parameter_at(*place) is tensor:
                self.found = place
                return True
            missed.append(tensor)
        if step is None or step == self._step:
            return False
        # Once a step: the model may have others now.
        self._step = step
        self._known = {id(p): (node, name) for node, name, p in self._state.parameters()}
        return self.find(missed, None)

    def have_shapes_of(self, tensors: Sequence[torch.Tensor]) -> bool:
        """True if these may stand for the parameters that find() knows, in their order."""
        known = [parameter_at(*place) for place in self._known.values()]
        shapes = [p.shape for p in known if p is not None and p.requires_grad]
        return bool(shapes) and shapes == [tensor.shape for tensor in tensors]


class _Leaves:
    """The leaves of the graph of ``root``, nearest first, until ``most`` nodes were met."""

    #: Without the extension no node shows that a gradient is recorded at it.
    has_recorded = False

    def __init__(self, root: torch.Tensor, most: int, recorder: HookRecorder) -> None:
        self._root = root
        self._most = most

    def __iter__(self) -> Iterator[torch.Tensor]:
        waiting: deque[Any] = deque([self._root.grad_fn])
        met = set()
        while waiting:
            for following, _ in getattr(waiting.popleft(), "next_functions", ()):
                if following is None or following in met:
                    continue
                met.add(following)
                if len(met) >= self._most:
                    return
                waiting.append(following)
                leaf = getattr(following, "variable", None)
                if leaf is not None:
                    yield leaf


_leaves_of = _Leaves if status.module is None else status.module.GraphLeaves


def _replicated(loss: Any) -> Optional[torch.Tensor]:
    """The part on this rank of a DTensor that is the same on each; None of any other tensor."""
    placements = getattr(loss, "placements", ())
    held = held_by(loss) if all(each.is_replicate() for each in placements) else loss
    return held if held is not loss and can_read(held) else None


def _times(loss: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """The product that backward(gradient=) makes of a loss, without a graph."""
    loss = _without_graph(loss)
    if not can_read(gradient):
        return loss
    with unobserved():
        return loss * gradient.detach().reshape(loss.shape)


def _constant_scale(root: torch.Tensor) -> Optional[float]:
    """The constant that the loss, a product, was multiplied by last, where it is a power of two of
    at least 128: a loss scale, by which the division is exact. Weights of losses are smaller.
    """
    try:
        factor = getattr(root.grad_fn, "_saved_other", None)
        if not isinstance(factor, torch.Tensor) or factor.dim() or factor.device.type != "cpu":
            return None
        with unobserved():
            value = float(factor)
    except RuntimeError:  # changed in place since, or in a graph that is gone
        return None
    is_scale = 128 <= value < math.inf and math.frexp(value)[0] == 0.5
    return value if is_scale else None


def _may_be_nonfinite(tensor: torch.Tensor) -> bool:
    """Reads it on the CPU alone: elsewhere that would wait for the device."""
    if not tensor.is_cpu or not can_read(tensor):
        return True
    with unobserved():
        return not bool(torch.isfinite(tensor.detach()).all())


def check_given(loss: Any) -> None:
    """Raises ConfigError for what monitor.step(loss=) was given, if it can hold no loss."""
    kinds = (torch.Tensor, Real, tuple, list, Mapping)
    if not (loss is None or isinstance(loss, kinds) or dataclasses.is_dataclass(loss)):
        raise ConfigError(
            "monitor.step(loss=) was given no loss",
            expected="a tensor, a number, or a tuple, list, dict or dataclass of tensors",
            got=f"{type(loss).__name__}: {loss!r}",
            hint="monitor.step() without loss= ends the step too",
        )


def _without_graph(tensor: torch.Tensor) -> torch.Tensor:
    with unobserved():
        return tensor.detach()


def _tensors(value: Any) -> list[torch.Tensor]:
    return [tensor for _, tensor in flatten(value, "")]
