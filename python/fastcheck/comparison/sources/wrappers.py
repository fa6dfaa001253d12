"""Unwraps a state_dict from ``{"state_dict": ...}``, DistributedDataParallel's ``module.`` etc."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

__all__ = ["matching_prefixes", "without_prefix"]

# What trainers and torch's wrappers put before the names of a model's state_dict.
_WRAPPERS = frozenset(
    {
        "_fsdp_wrapped_module",
        "_orig_mod",
        "ema",
        "generator",
        "model",
        "model_state",
        "model_state_dict",
        "module",
        "net",
        "network",
        "params",
        "state_dict",
        "weights",
    }
)
_MAX_WRAPPERS = 4


def matching_prefixes(ours: Iterable[str], theirs: Iterable[str]) -> tuple[str, str]:
    """The wrappers of each side without which the most names are on both; "" where it is none.

    Names stay as they are where that has as many in common.
    """
    left, right = list(ours), list(theirs)
    best, common = ("", ""), len(set(left) & set(right))
    for mine in _prefixes(left):
        shown = {without_prefix(name, mine) for name in left}
        for other in _prefixes(right):
            found = sum(without_prefix(name, other) in shown for name in right)
            if found > common:
                best, common = (mine, other), found
    return best


def without_prefix(name: str, prefix: str) -> str:
    """``name``, without ``prefix`` if it begins with it."""
    return name[len(prefix) :] if prefix and name.startswith(prefix) else name


def _prefixes(names: list[str]) -> list[str]:
    """``""`` and each row of wrappers that names begin with, the shortest first."""
    found: Counter[str] = Counter()
    for name in names:
        prefix = ""
        for part in name.split(".")[:-1][:_MAX_WRAPPERS]:
            if part not in _WRAPPERS:
                break
            prefix += f"{part}."
            found[prefix] += 1
    return ["", *sorted(found, key=len)]
