"""Functions by their bare names, as the old tools' lists take them."""

from __future__ import annotations

from typing import Any

import torch

from .._errors import ConfigError, did_you_mean, explain

__all__ = ["api_names", "is_function"]

_HOLDERS: tuple[tuple[str, Any], ...] = (
    ("Functional", torch.nn.functional),
    ("Torch", torch),
    ("Tensor", torch.Tensor),
)


def is_function(name: str) -> bool:
    """Whether a name of a list is ``relu``, and no call or module."""
    return any(callable(getattr(holder, name, None)) for _, holder in _HOLDERS)


def api_names(function: str) -> list[str]:
    """``relu``: ``Functional.relu``, ``Torch.relu`` and ``Tensor.relu``, those that there are."""
    found = [
        f"{kind}.{function}"
        for kind, holder in _HOLDERS
        if callable(getattr(holder, function, None))
    ]
    if found:
        return found
    known = {name for _, holder in _HOLDERS for name in dir(holder) if not name.startswith("_")}
    raise ConfigError(
        explain(
            f"api_list= names a function that torch does not have: {function!r}",
            expected='a name such as "relu", of torch, torch.Tensor or torch.nn.functional',
            came=repr(function),
            do=did_you_mean(function, known),
        )
    )
