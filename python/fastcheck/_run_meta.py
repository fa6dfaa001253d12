"""What the log says of the run itself: the options, the environment, and each optimizer's groups as
they are at its first step.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from ._calls import ModuleNode
from ._config import Config
from ._environment import environment
from ._inventory import describe_optimizer
from ._ledger import Ledger

__all__ = ["RunMeta", "own_rank"]


class RunMeta:
    """Gathers what goes into the meta file. Costs nothing until it is written."""

    def __init__(self, config: Config, nodes: Sequence[ModuleNode], ledger: Ledger) -> None:
        self._config = config
        self._nodes = nodes
        self._ledger = ledger
        self._optimizers: list[dict[str, Any]] = []
        self._met: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def to_dict(self) -> dict[str, Any]:
        """All that is known until now, ready for JSON."""
        made = self._config.to_meta()
        try:
            made["environment"] = environment()
        except Exception as error:  # a machine that can't be asked is no reason to lose a log
            made["environment"] = {"error": str(error)}
        if self._optimizers:
            made["optimizers"] = self._optimizers
        return made

    def meet(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to step: the first time, its groups are written down. Never raises:
        a group that can't be described is worth no run.
        """
        if optimizer in self._met:
            return
        self._met.add(optimizer)
        try:
            self._optimizers.append(describe_optimizer(optimizer, self._names()))
        except Exception as error:
            self._optimizers.append({"type": type(optimizer).__name__, "error": str(error)})
        with self._ledger.lock:
            if self._ledger.log is not None:
                self._ledger.log.add_meta(optimizers=self._optimizers)

    def _names(self) -> dict[int, str]:
        found: dict[int, str] = {}
        for node in self._nodes:
            module = node.module()
            for name, parameter in () if module is None else module._parameters.items():
                if parameter is not None:
                    path = f"{node.path}.{name}" if node.path else name
                    found.setdefault(id(parameter), path)
        return found


def own_rank() -> int:
    """The number of this process among those that train together; 0 where it is alone."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    rank = os.environ.get("RANK", "0")
    return int(rank) if rank.isdecimal() else 0
