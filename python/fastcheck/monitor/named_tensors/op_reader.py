"""Reads the tensors of observe() for a monitor at op level, where operator results have records."""

from __future__ import annotations

from typing import Optional

import torch

from fastcheck.monitor.hooks.traced import Traced
from fastcheck.monitor.op_level.hooks import OpModuleObserver
from fastcheck.record.format import Flag
from fastcheck.verdict.entries import NamedResult

from .reader import NamedGradient, NamedTensors, _is_in_backward


class OpNamedTensors(NamedTensors):
    """The record of a name comes besides that of the operator, which events go by."""

    observer: OpModuleObserver

    @property
    def is_running(self) -> bool:
        return not self._session.removed and bool(self.observer.modules)

    def _read(
        self, name: str, tensor: torch.Tensor, traced: Optional[Traced]
    ) -> Optional[NamedGradient]:
        session, modules = self.observer.session, self.observer.modules
        if not modules and not _is_in_backward():
            if session.is_paused:
                return None
            session.begin_step_if_closed()
            session.apply_pause()
        module = modules[-1] if modules else None
        is_left_out = (
            session.config.include is not None if module is None else not module.is_selected
        )
        if not session.is_active or is_left_out:
            return None
        call = self._call(name, module, None)
        if self._is_wanted("output"):
            flags = int(Flag.RECOMPUTE) if call.is_recompute else 0
            self._read_again(tensor, call.node.site("output", "output", 0), call.index, flags)
        if self._is_wanted("grad_output"):
            return self._watch(tensor, call, -1, traced)
        return None

    def _read_gradient(self, hook: NamedGradient, gradient: torch.Tensor) -> None:
        self._read_again(gradient, hook.site, hook.call.index, self._gradient_flags(hook))

    def _is_wanted(self, role: str) -> bool:
        roles = self._session.config.filter.roles
        return not roles or role in roles

    def _read_again(self, tensor: torch.Tensor, site: int, call: int, flags: int) -> None:
        session = self.observer.session
        role = session.sites[site].role
        seq, is_bad, source = session.read_again(tensor, site, call, flags)
        session.saw(NamedResult(seq, role, source, session.is_scaled), is_bad)
