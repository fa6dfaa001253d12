"""What a model stores, at op level: read once, by name, and remembered by the observer."""

from __future__ import annotations

from typing import Any, Optional

import torch

from ._calls import ModuleNode
from ._finding import Finding
from ._state import StateReader

__all__ = ["NothingSeen", "OpState"]


class OpState(StateReader):
    """Stored tensors are read once: every later change of them is an op, which is read itself."""

    def read_stored(self) -> None:
        """Parameters and buffers of the modules that are not left out."""
        roles = self._session.config.roles
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
        if not scaled:
            session.note(session.ledger.settle_silent, session.step)
        session.step.state_read = True

    def read_gradients(self, optimizer: torch.optim.Optimizer, *, scaled: bool) -> None:
        self._session.step.state_read = True

    def check(self, step: Any, node: ModuleNode, asked_for: Finding) -> Optional[Finding]:
        return None


class NothingSeen:
    """Remembers nothing: the observer knows what was read."""

    def add(self, tensor: torch.Tensor, token: int) -> int:
        return -1

    def clear(self) -> None:
        pass

    def __len__(self) -> int:
        return 0
