"""What the old tools' options are checked with, and told to mean."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

from .._errors import ConfigError, FastcheckWarning, did_you_mean, explain
from .._run_meta import own_rank

__all__ = ["check_names", "one_of", "rank", "refuse", "say"]

rank = own_rank

_said: set[str] = set()


def say(text: str) -> None:
    """A FastcheckWarning; each text once in a process."""
    if text not in _said:
        _said.add(text)
        warnings.warn(f"fastcheck.compat: {text}", FastcheckWarning, stacklevel=3)


def refuse(what: str, *, came: Any, do: str, expected: str = "what docs/compat.md lists") -> None:
    """ConfigError for what has no meaning here."""
    raise ConfigError(explain(what, expected=expected, came=repr(came), do=do))


def one_of(name: str, value: Any, choices: Iterable[str], do: str = "") -> Any:
    """``value``, when it is one of them; ConfigError otherwise."""
    known = list(choices)
    if isinstance(value, str) and value in known:
        return value
    raise ConfigError(
        explain(
            f"{name} is not one of those that there are",
            expected=" or ".join(f'"{one}"' for one in known),
            came=repr(value),
            do=did_you_mean(str(value), known) or do,
        )
    )


def check_names(what: str, given: Iterable[str], known: Iterable[str], do: str = "") -> None:
    """ConfigError for the first name that is not known."""
    names = sorted(known)
    for name in given:
        if name not in names:
            raise ConfigError(
                explain(
                    f"{what} is not known: {name!r}",
                    expected=", ".join(names),
                    came=repr(name),
                    do=did_you_mean(str(name), names) or do,
                )
            )
