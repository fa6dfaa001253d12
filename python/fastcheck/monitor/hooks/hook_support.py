"""Checks that the modules given to install() are initialised and accept hooks."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.jit._script import RecursiveScriptModule

from fastcheck.errors import ConfigError, explain


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


def check_hookable(model: torch.nn.Module) -> None:
    """ConfigError when the model itself does not accept hooks."""
    if not takes_hooks(model):
        raise ConfigError(
            explain(
                "a module compiled by torch.jit.script does not accept hooks",
                expected="a model in Python",
                got=f"the model, scripted from {_script_of(model)}",
                hint="install() on the model from which it was scripted",
            )
        )


def unhookable_note(observed: Iterable[tuple[str, torch.nn.Module]]) -> str:
    """Names those of these modules, by path, that do not accept hooks; empty without any."""
    found: dict[str, str] = {}
    for path, module in observed:
        inner = path.split(".")
        outer = {".".join(inner[:count]) for count in range(1, len(inner))}
        if not takes_hooks(module) and outer.isdisjoint(found):
            found[path] = f"{path} (scripted from {_script_of(module)})"
    named = ", ".join(found.values())
    return named and f"not observed, a module of torch.jit.script does not accept hooks: {named}"


def _script_of(module: torch.nn.Module) -> str:
    return str(getattr(module, "original_name", type(module).__name__))
