"""Adapters for trainers: one file for each framework, which is imported when its adapter is used.

    trainer = transformers.Trainer(..., callbacks=[fastcheck.callbacks.HuggingFace()])
    trainer = lightning.Trainer(callbacks=[fastcheck.callbacks.Lightning()])

Imports ``monitor`` and below.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .huggingface import HuggingFace
    from .lightning import Lightning

__all__ = ["HuggingFace", "Lightning"]

_MODULES = {"HuggingFace": "huggingface", "Lightning": "lightning"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
