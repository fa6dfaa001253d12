"""Sorts values into groups."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Callable, TypeVar

_Value = TypeVar("_Value")
_Key = TypeVar("_Key")


def grouped(values: Iterable[_Value], key_of: Callable[[_Value], _Key]) -> dict[_Key, list[_Value]]:
    """The values of each key, in the order in which they came."""
    groups: dict[_Key, list[_Value]] = {}
    for value in values:
        groups.setdefault(key_of(value), []).append(value)
    return groups
