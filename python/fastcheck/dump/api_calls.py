"""Calls of torch's Python API, numbered as msprobe and ptdbg_ascend number them:
``Functional.softmax.7`` is the eighth call of ``torch.nn.functional.softmax`` in the step.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from .._compat import is_compiling
from .records import is_quiet

__all__ = ["ApiCalls", "api_of"]

_TENSOR_METHODS = torch.Tensor.__mro__[:2]  # the second is C++, its name is not the same everywhere


class _Local(threading.local):
    def __init__(self) -> None:
        self.current = ("", -1)
        self.counts: Counter[str] = Counter()


class ApiCalls(TorchFunctionMode):
    """Says which API is running. What an API calls inside is part of it and has no number."""

    def __init__(self) -> None:
        super().__init__()
        self._local = _Local()

    @property
    def current(self) -> tuple[str, int]:
        """Its name and number; ("", -1) where none is running."""
        return self._local.current

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_compiling():  # Dynamo follows this, and has no use for it
            return func(*args, **kwargs)
        name = "" if is_quiet() else api_of(func)
        if not name:
            return func(*args, **kwargs)
        local = self._local
        before = local.current
        local.current = (name, local.counts[name])
        local.counts[name] += 1
        try:
            return func(*args, **kwargs)
        finally:
            local.current = before


_known: dict[Any, str] = {}


def api_of(func: Any) -> str:
    """``Functional.softmax``; empty for what is no function of torch's Python API."""
    found = _known.get(func)
    if found is None:
        found = _known[func] = _name(func)
    return found


def _name(func: Any) -> str:
    name = getattr(func, "__name__", "")
    if not name or (name.startswith("__") and not name.endswith("__")):
        return ""
    # A builtin may be a function of torch and of torch.nn.functional (linear): the latter is
    # what is called.
    if getattr(torch.nn.functional, name, None) is func:
        return f"Functional.{name}"
    if any(getattr(kind, name, None) is func for kind in _TENSOR_METHODS):
        return "" if name in ("__get__", "__set__", "backward") else f"Tensor.{name}"
    if getattr(torch, name, None) is func:
        return f"Torch.{name}"
    if getattr(torch._VF, name, None) is func:
        return f"VF.{name}"
    return ""
