"""The session of one installed monitor: the steps over the tensors that SessionReadings reads.

A step is open from its first forward (or gradient) until something closes it; the step index moves
on with the next forward or gradient after that, so that several optimizers that step one after the
other belong to one step.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from fastcheck.errors import ConfigError, explain
from fastcheck.record.format import Flag
from fastcheck.record.site import SiteTable
from fastcheck.utils.torch.dry_runs import is_dry_run
from fastcheck.utils.torch.rank import Ranks
from fastcheck.utils.torch.transforms import in_transform
from fastcheck.utils.torch.versions import GradScaler
from fastcheck.verdict.allowed import Allowance, tell_allowances
from fastcheck.verdict.entries import GradientNorm, Loss, LossKnown

from .backwards import Backwards
from .batches import BatchIds
from .config import Config
from .numbers import StepNumbers
from .readings import SessionReadings

# A served model never closes a step: what is remembered of it is renewed at this size.
_MAX_SEEN = 65536


class Session(SessionReadings):
    """The steps of one monitor. Every method expects ``lock`` to be held."""

    #: Whether what it observes includes models that install() was not given.
    observes_all_models = False
    #: Whether the tensors of captured graphs are read.
    reads_captured_graphs = True

    def __init__(self, config: Config, sites: SiteTable, ranks: Ranks) -> None:
        super().__init__(config, sites, ranks)
        #: What each step trains on, where the training loop names it.
        self.batches = BatchIds()
        self.backwards = Backwards()
        tell_allowances(self)

    def allow(self, allowances: list[Allowance]) -> None:
        """What is observed from now on may be non-finite where one of these covers it. Takes the
        lock itself.
        """
        with self.lock:
            try:
                if not self.removed:
                    self.note(self.event_store.allow, allowances)
            except Exception as error:
                self.report_internal_error("allow_nonfinite()", error)

    @property
    def numbers(self) -> StepNumbers:
        """Reads the numbers of the open step."""
        return StepNumbers(self)

    def open_recorder(self) -> None:
        """The step is open, and what the model stores was read: until something else is to be done
        the hooks may go their short way.
        """
        if not self.is_active or self.is_closed or self.removed or self.off_sites:
            return
        if self.tape is not None or in_transform():  # it would leave wrapped tensors unread
            return
        step = self.step
        self.recorder.open(
            step.index,
            step.calls.add,
            step.findings.all,
            step.journal.entries if self.is_deferred else None,
            step.gradients,
            self.follows_gap,
            int(Flag.SCALED) if self.is_scaled else 0,
        )

    # Steps

    def begin_pass(self) -> None:
        """A forward enters the observed modules from outside."""
        if self.ended_before():
            self.close_step()
        self.begin_step_if_closed()
        self.backwards.called(self.step.index)
        self.apply_pause()
        if len(self.seen) > _MAX_SEEN:
            self.seen.clear()
        if len(self.step.journal.entries) > _MAX_SEEN:
            self.submit()
        if not self.is_deferred:
            with self.event_store.lock:
                self.event_store.renew(self.step)
        self.recorder.close()

    def end_pass(self) -> None:
        """A forward that no backward will follow has left the observed modules."""
        if self.is_deferred and not len(self.drain):
            self.submit()

    def begin_step_if_closed(self) -> None:
        """The first forward or gradient after a step was closed opens the next one."""
        if not self.is_closed:
            return
        step = self.step
        self.note(self.event_store.end, step)
        if self.is_deferred:
            self.submit()
        for handle in step.leaf_handles:
            handle.remove()
        self.seen.clear()
        if step.update_count > step.guarded_count or step.is_partly_updated:
            self.updated_steps.append(step.index)
        self.step = self.event_store.new_step(step.index + 1, self.next_seq)
        self.is_closed = False
        self.is_active = self.config.observes(self.step.index)

    def begin_at(self, step: int) -> None:
        """The first step has this number. ConfigError: it is not one, or something was read."""
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise ConfigError(
                explain("step must be an int >= 0", expected="0, 1, 2, ...", got=repr(step))
            )
        if self.next_seq:
            raise ConfigError(
                explain(
                    "begin_at() was called too late",
                    expected="a call before the model has run",
                    got=f"a call after {self.next_seq:,} tensors were read",
                )
            )
        self.step = self.event_store.new_step(step)
        self.is_active = self.config.observes(step)

    def pause(self, is_paused: bool) -> None:
        """The passes that begin from now on are not read, or are again."""
        self.is_paused = is_paused

    def apply_pause(self) -> None:
        """A pass begins, and is read or not."""
        is_wanted = self.config.observes(self.step.index) and not self.is_paused
        is_wanted = is_wanted and not is_dry_run()
        if self.is_active and not is_wanted:
            # What it would have decided stays as it is.
            self.note(self.event_store.close, self.step)
        self.is_active = is_wanted

    def close_step(self) -> None:
        """Settles the step and has it written down. May be called again for the same step, after
        more records.
        """
        self.recorder.close()
        self.is_closed = True
        if not self.is_active:
            return
        self.overflow.read()
        self.note(self.event_store.close, self.step)
        if self.is_deferred:
            self.submit(closes_step=True)
            if self.config.sync == "never":
                self.drain.bound()
            else:
                self.drain.wait()

    def end_part(self) -> None:
        """An optimizer has stepped, and another one is going to, in the same step."""
        # Where ranks meet before an update, they do it before the next one too.
        self.step.has_met = False
        if self.is_active and self.is_deferred:
            self.submit()
            if self.config.sync != "never":
                self.drain.wait()

    def update_began(self) -> None:
        """An optimizer steps, in this thread, until update_ended() or until it raises."""

    def update_ended(self, optimizer: torch.optim.Optimizer) -> None:
        """The opposite of update_began()."""

    def evaluation_began(self) -> None:
        """The optimizer calls the closure of its step; update_began() once it has returned."""

    def update_uses(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer is about to use its gradients, which carry no loss scale."""

    def backward_began(self, roots: Sequence[torch.Tensor]) -> None:
        """``torch.autograd.backward`` is called on these."""

    def backward_ended(self) -> None:
        """It, or ``torch.autograd.grad``, is over."""

    def loss_given(self, loss: Any) -> None:
        """``monitor.step(loss=)`` was called with these tensors."""

    # The loss, and other numbers

    @property
    def reads_numbers(self) -> bool:
        """Whether the loss and other numbers are read by themselves."""
        return True

    def read_number(self, number: torch.Tensor, site: int) -> int:
        """Reads a tensor that is none of the model; the number of its record."""
        return self.observe(number, site, 0, 0)[0]

    def read_norm(self, norm: torch.Tensor, site: int) -> None:
        """Reads the norm of all gradients, as clipping has computed it."""
        seq, is_bad = self.observe(norm, site, 0, 0)
        self.saw(GradientNorm(seq, self.is_scaled), is_bad)

    def read_loss(self, loss: torch.Tensor, site: int, is_scaled: bool) -> None:
        """Reads a loss. ``is_scaled``: it carries a scale of the user's own."""
        token = self.seen.add(loss, self.next_seq)
        if token >= 0:
            self.due(LossKnown(token))
            return
        seq, is_bad = self.observe(loss, site, 0, int(Flag.SCALED) if is_scaled else 0)
        self.saw(Loss(seq, is_scaled, threading.get_ident()), is_bad)

    # Loss scaling

    def scaled_by(self, scaler: GradScaler) -> None:
        """The loss of this step was scaled by ``scaler``."""
        self.recorder.close()
        self.step.scaler = weakref.ref(scaler)

    @property
    def is_scaled(self) -> bool:
        """Gradients of this step carry a loss scale."""
        return self.step.scaler is not None or self.has_own_scale

    @property
    def has_own_scale(self) -> bool:
        """The loss is scaled without a GradScaler."""
        training = self.config.training
        return training.has_own_scaling and training.scaler != 1.0
