"""The log's meta data of a run: options, environment, and optimizer groups at their first step."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from fastcheck.calls.module_calls import ModuleNode
from fastcheck.reproducibility.environment import environment_or_error
from fastcheck.reproducibility.inventory import describe_optimizer
from fastcheck.reproducibility.placement import placement

from .config import Config
from .event_store import EventStore
from .schedule import Schedule


class RunMeta:
    """Gathers what goes into the meta file. Costs nothing until it is written."""

    def __init__(
        self, config: Config, nodes: Sequence[ModuleNode], event_store: EventStore
    ) -> None:
        self._config = config
        self._nodes = nodes
        self._event_store = event_store
        self._optimizers: list[dict[str, Any]] = []
        self._met: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = (
            weakref.WeakKeyDictionary()
        )
        self.schedule = Schedule(event_store)
        self._compiled_count = 0

    def to_dict(self) -> dict[str, Any]:
        """All that is known until now, ready for JSON."""
        made = self._config.to_meta()
        made["environment"] = environment_or_error()
        made["placement"] = self._placement()
        if self._optimizers:
            made["optimizers"] = self._optimizers
        if self._event_store.compiled:
            made["compiled_modules"] = len(self._event_store.compiled)
        return made

    def learning_rates(self) -> tuple[tuple[str, float], ...]:
        """Of each group of the optimizers that have stepped, by class; no number on a device."""
        found = [
            (type(optimizer).__name__, float(group["lr"]))
            for optimizer in self._met
            for group in optimizer.param_groups
            if isinstance(group.get("lr"), (int, float))
        ]
        return tuple(dict.fromkeys(found))

    def at_step_boundary(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        """An optimizer is about to step: the first time, its groups are written down. Never raises:
        a group that can't be described is worth no run.
        """
        compiled = len(self._event_store.compiled)
        if compiled != self._compiled_count:
            self._compiled_count = compiled
            self._add(compiled_modules=compiled)
        number = self._met.get(optimizer)
        if number is not None:
            self.schedule.follow(step, number, optimizer)
            return
        number = self._met[optimizer] = len(self._optimizers)
        self.schedule.follow(step, number, optimizer)
        try:
            self._optimizers.append(describe_optimizer(optimizer, self._names()))
        except Exception as error:
            self._optimizers.append({"type": type(optimizer).__name__, "error": str(error)})
        # Wrapped or sharded since install(), it may hold another part of the model.
        self._add(optimizers=self._optimizers, placement=self._placement())

    def _placement(self) -> dict[str, Any]:
        roots = (node.module() for node in self._nodes if node.is_root)
        return placement(module for module in roots if module is not None)

    def _add(self, **fields: Any) -> None:
        with self._event_store.lock:
            if self._event_store.log is not None:
                self._event_store.log.add_meta(**fields)

    def _names(self) -> dict[int, str]:
        found: dict[int, str] = {}
        for node in self._nodes:
            module = node.module()
            for name, parameter in () if module is None else module._parameters.items():
                if parameter is not None:
                    path = f"{node.path}.{name}" if node.path else name
                    found.setdefault(id(parameter), path)
        return found
