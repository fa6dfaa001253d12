"""Checks options of the old tools; an option without a counterpart is an error or a warning."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn, Union

from fastcheck.comparison.compare import compare
from fastcheck.errors import ConfigError, did_you_mean, explain, warn

_warned: set[str] = set()


def warn_once(text: str) -> None:
    """Emits a FastcheckWarning, each text once in a process."""
    if text not in _warned:
        _warned.add(text)
        warn(f"fastcheck.compat: {text}")


def raise_config_error(
    what: str, *, got: Any, hint: str, expected: str = "what docs/compat.md lists"
) -> NoReturn:
    """Raises ConfigError for a value that has no counterpart in fastcheck."""
    raise ConfigError(explain(what, expected=expected, got=repr(got), hint=hint))


def check_names(what: str, given: Iterable[str], known: Iterable[str], hint: str = "") -> None:
    """Raises ConfigError for the first of the names that is not in ``known``."""
    names = sorted(known)
    for name in given:
        if name not in names:
            raise ConfigError(
                explain(
                    f"unknown {what} {name!r}",
                    expected=", ".join(names),
                    got=repr(name),
                    hint=did_you_mean(str(name), names) or hint,
                )
            )


def compare_paths(
    given: Mapping[str, Any],
    *,
    actual: Sequence[str],
    reference: Sequence[str],
    unused: Sequence[str],
    output_path: Union[str, os.PathLike[str], None],
) -> Any:
    """The Comparison, which is printed too. ``actual`` and ``reference``: the keys of a side, the
    first that is there counts.
    """
    check_names("key of input_param", given, (*actual, *reference, *unused))
    sides = []
    for keys in (actual, reference):
        path = next((given[key] for key in keys if given.get(key)), None)
        if path is None:
            raise ConfigError(
                explain(
                    "input_param has no path of one side",
                    expected=" or ".join(keys),
                    got=", ".join(given) or "nothing",
                )
            )
        sides.append(path)
    csv = None
    if output_path is not None:
        os.makedirs(output_path, exist_ok=True)
        csv = os.path.join(os.fspath(output_path), "compare_result.csv")
    found = compare(sides[0], sides[1], csv=csv)
    print(found)
    return found
