"""Checks that the modules given to install() are initialised and accept hooks."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.jit._script import RecursiveScriptModule

from fastcheck.errors import ConfigError, explain

__all__ = ["check_built", "check_hookable", "takes_hooks"]


def check_built(model: torch.nn.Module) -> None:
    """ConfigError when a module in the model has not called its ``__init__``."""
    waiting = [model]
    seen: set[int] = set()
    while waiting:
        module = waiting.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        children = getattr(module, "_modules", None)
        if children is None or getattr(module, "_forward_hooks", None) is None:
            raise ConfigError(
                explain(
                    "install() was given a module that is not initialised",
                    expected="a torch.nn.Module whose __init__ has run",
                    got=f"a {type(module).__name__} without the attributes of one",
                    hint="call super().__init__() first in its __init__",
                )
            )
        waiting += [child for child in children.values() if child is not None]


def takes_hooks(module: torch.nn.Module) -> bool:
    """False for a module compiled by torch.jit.script."""
    return not isinstance(module, RecursiveScriptModule)


def check_hookable(observed: Mapping[str, torch.nn.Module]) -> None:
    """ConfigError when one of these modules, by path, does not accept hooks."""
    for path, module in observed.items():
        if not takes_hooks(module):
            script = getattr(module, "original_name", type(module).__name__)
            raise ConfigError(
                explain(
                    "a module compiled by torch.jit.script does not accept hooks",
                    expected="Python modules",
                    got=f"{path or 'the model'}, scripted from {script}",
                    hint=f'exclude="{path}"'
                    if path
                    else "install() on the model from which it was scripted",
                )
            )
