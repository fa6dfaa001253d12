"""Reads parameters and buffers once, by name, for the observer at op level."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional

import torch

from fastcheck.calls.module_calls import ModuleNode
from fastcheck.monitor.hooks.state_reader import StateReader, stored_in
from fastcheck.utils.torch.readable import can_hold_nonfinite
from fastcheck.verdict.entries import Moment, OpStored


class OpState(StateReader):
    """Stored tensors are read once: every later change of them is an op, which is read itself."""

    def read_stored(self) -> None:
        """Parameters and buffers of the modules that are not left out."""
        roles = self._session.config.filter.roles
        if roles and "param" not in roles:
            return
        every, self._nodes = self._nodes, [node for node in self._nodes if node.is_selected]
        try:
            super().read_stored()
        finally:
            self._nodes = every

    def read_for_update(
        self,
        optimizer: Optional[torch.optim.Optimizer],
        *,
        gradients: bool = True,
        scaled: bool = False,
    ) -> None:
        session = self._session
        if not scaled and optimizer is not None and gradients:
            session.level.update_uses(optimizer)
        if not scaled:
            session.due(Moment.UPDATE_DUE)
        session.step.update.state_read = True

    def read_statistics(self, node: ModuleNode) -> None:
        """The running statistics of a norm that has just run, where its operator does not show that
        it writes them.
        """
        session = self._session
        for name, buffer in stored_in(node, "_buffers").items():
            if buffer is not None and can_hold_nonfinite(buffer):
                before = session.next_seq
                seq, is_bad = session.level.observe(buffer, node.site("buffer", name, 0), 0, 0)
                if seq >= before:
                    session.level.saw(OpStored(seq, "buffer"), is_bad)

    def read_gradients(
        self, optimizer: torch.optim.Optimizer, *, scaled: bool, is_early: bool = False
    ) -> None:
        self._session.step.update.state_read = True

    def read_before_clipping(
        self, gradients: Sequence[torch.Tensor], owned: Optional[set[int]], *, scaled: bool
    ) -> bool:
        return False

    def after_backward(self, owned: Optional[set[int]]) -> bool:
        return False

    def were_clipped(self, gradients: Sequence[torch.Tensor]) -> bool:
        """Whether these are all gradients, so that their norm is that of the step."""
        if not self._session.backwards.owns_gradients:
            return False
        clipped = {id(gradient) for gradient in gradients}
        parameters = (p for node in self._nodes for p in stored_in(node, "_parameters").values())
        own = [p.grad for p in parameters if p is not None and p.grad is not None]
        return bool(own) and all(id(gradient) in clipped for gradient in own)

    def read_optimizer_state(self, optimizer: torch.optim.Optimizer) -> None:
        """The operators that make it are read."""


class NothingSeen:
    """Remembers nothing: the observer knows what was read."""

    def add(self, tensor: torch.Tensor, token: int) -> int:
        return -1

    def clear(self) -> None:
        pass

    def __len__(self) -> int:
        return 0
