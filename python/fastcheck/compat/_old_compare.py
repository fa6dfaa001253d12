"""compare() as the old tools call it: two paths in a dict."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Union

from .._compare import compare
from .._errors import ConfigError, explain
from ._options import check_names

__all__ = ["compare_paths"]


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
    check_names("the key of input_param", given, (*actual, *reference, *unused))
    sides = []
    for keys in (actual, reference):
        path = next((given[key] for key in keys if given.get(key)), None)
        if path is None:
            raise ConfigError(
                explain(
                    "input_param lacks a side",
                    expected=" or ".join(keys),
                    came=", ".join(given) or "nothing",
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
