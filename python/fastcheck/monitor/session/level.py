"""A session's level: how a tensor becomes a record, and a record a verdict."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Callable, Optional

import torch

from fastcheck.calls.module_calls import ModuleNode
from fastcheck.calls.recorder import HookRecorder
from fastcheck.calls.stored import TensorBatch
from fastcheck.log.unobserved import UnreadOp
from fastcheck.ring.host import UNREAD
from fastcheck.utils.torch.seen_tensors import SeenTensors
from fastcheck.verdict import entries
from fastcheck.verdict.step import ReadTensor


class Level:
    """The way in which tensors become records, and records findings: each tensor where a hook sees
    it (ModuleLevel), or where an operator reads or makes it. Expects the session's lock to be held.
    What is not overridden does nothing.
    """

    recorder: HookRecorder
    seen: SeenTensors
    #: Some modules are not observed.
    has_excluded: bool
    #: True if the tensors of captured graphs are read.
    reads_captured_graphs: bool
    #: The sequence number of the next record.
    next_seq: int

    @property
    def observes_all_models(self) -> bool:
        """True if what it observes includes models that install() was not given."""
        return False

    @property
    def reads_numbers(self) -> bool:
        """True if the loss and other numbers are read by themselves."""
        return True

    def read(
        self, tensor: torch.Tensor, site: int, call: int, flags: int, any_dtype: bool = False
    ) -> int:
        """Reads a tensor unless it was read before: UNREAD, or bits and a seq (HookReader). At op
        level nothing is read in this way.
        """
        return UNREAD

    def observe(
        self, tensor: torch.Tensor, site: int, call: int, flags: int
    ) -> tuple[int, Optional[bool]]:
        """Reads a tensor: the sequence number of its record, and whether it holds anything
        non-finite; None when that is not known yet.
        """
        raise NotImplementedError

    def observe_list(
        self,
        batch: TensorBatch,
        flags: int = 0,
        kind: Callable[..., entries.Seen] = entries.Stored,
        *fields: Any,
    ) -> None:
        """observe() and saw() of many tensors, in one call for each device: with the entry Stored
        of what modules store, and ``kind(first_seq, roles, *fields)`` of the others.
        """

    def saw(self, entry: entries.Seen, is_bad: Optional[bool]) -> None:
        """Judges what was just read if it is non-finite: now, or when its record arrives."""

    def read_stored(self, node: Optional[ModuleNode]) -> Iterable[ReadTensor]:
        """Reads what a module and its submodules (None: all modules) store, in the middle of a
        verdict: what is bad.
        """
        return ()

    def read_number(self, number: torch.Tensor, site: int) -> int:
        """Reads a tensor that is none of the model; the number of its record."""
        raise NotImplementedError

    def read_norm(self, norm: torch.Tensor, site: int) -> None:
        """Reads the norm of all gradients, as clipping has computed it."""

    def read_loss(self, loss: torch.Tensor, site: int, flags: int, is_scaled: bool) -> None:
        """Reads a loss. ``flags``: SCALED, if it carries a scale of the user's own, and ANEW.
        ``is_scaled``: it does, or is made of derivatives that carry one.
        """

    def forget(self) -> None:
        """Forgets all readings so far, and drops the records that the host has made."""

    def open_recorder(self) -> None:
        """The step is open, and what the model stores was read: until something else is to be done
        the hooks may go their short way.
        """

    def let_wait(self, device_type: str) -> None:
        """Lets small tensors of such devices wait for each other (csrc/torch/read/waiting.h)."""

    # Records from the rings to the event store

    def collect(self) -> None:
        """Takes in what is on the host already, and waits for nothing."""

    def gather(self) -> None:
        """Writes earlier readings to the journal, before an entry is written."""

    def submit(self, closes_step: bool) -> None:
        """Hands what was read until now, and the journal, to the drain."""

    # Actions of the session

    def pass_began(self, goes_on: bool) -> None:
        """A forward has entered the observed modules from outside. ``goes_on``: the step had begun
        before it.
        """

    def step_began(self) -> None:
        """The session has another step."""

    def begin_at(self, step: int) -> None:
        """The first step has this number."""

    def set_depth(self, depth: int) -> None:
        """``rings.depths.now`` is another than before."""

    def set_active(self, is_active: bool) -> None:
        """The pass that begins is read, or not."""

    def step_closed(self) -> None:
        """The step is settled; it may come again for the same step."""

    def flushed(self) -> None:
        """Called when all records of devices were taken in."""

    def scaled(self) -> None:
        """The loss of this step carries a scale."""

    def unread_ops(self) -> list[UnreadOp]:
        """The operators that op level could not observe."""
        return []

    # Events of the training loop

    def step_goes_on(self) -> None:
        """Another optimizer is about to step, after the step was closed."""

    def update_began(self) -> None:
        """An optimizer steps, in this thread, until update_ended() or until it raises."""

    def update_ended(self, optimizer: torch.optim.Optimizer) -> None:
        """The opposite of update_began()."""

    def evaluation_began(self) -> None:
        """The optimizer calls the closure of its step; update_began() once it has returned."""

    def update_uses(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer is about to use its gradients, which carry no loss scale."""

    def gradients_clipped(self, norm: torch.Tensor) -> None:
        """The gradients were clipped by this norm of theirs."""

    def backward_ended(self) -> None:
        """Called when backward, or ``torch.autograd.grad``, is over."""

    def loss_given(self, loss: Any) -> None:
        """``monitor.step(loss=)`` or ``torch.autograd.backward`` was called with these tensors."""
