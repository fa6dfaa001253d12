"""Differences of two nested dictionaries: environments, hyper-parameters, inventories."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from .block import Phase
from .names import Renaming

NOT_THERE = "not there"
# The place and time at which something ran explain no difference.
_NEVER = {"where", "fastcheck", "format"}
# The key of a rank: if the ranks differ, the compared values stand below such keys.
_OF_RANK = re.compile(r"rank \d+")
_BY_NAME = ("parameters", "buffers", "modules")


class Setting(NamedTuple):
    """A key whose values differ; ``not there`` where a side has no such key."""

    path: str
    actual: str
    reference: str


def differing_settings(
    phase: Phase, actual: Any, reference: Any, renaming: Renaming
) -> list[Setting]:
    """Every differing leaf, in the order of the reference. Names of parameters, buffers and modules
    are renamed on the actual side.
    """
    if phase is Phase.HYPERPARAMETERS:
        actual, reference = by_name(actual, renaming), by_name(reference, renaming.of_reference())
    return list(_differences("", actual, reference))


def alike_ranks(actual: Any, reference: Any) -> tuple[Any, Any]:
    """The two sides in the same form: by rank, for the ranks that both have; where one side alone
    is by rank, its first rank stands for it.
    """
    by_rank = [
        isinstance(side, Mapping) and bool(side) and all(map(_OF_RANK.fullmatch, map(str, side)))
        for side in (actual, reference)
    ]
    if by_rank == [True, False]:
        return next(iter(actual.values())), reference
    if by_rank == [False, True]:
        return actual, next(iter(reference.values()))
    if by_rank == [True, True]:
        common = [rank for rank in reference if rank in actual]
        actual, reference = ({r: side[r] for r in common} for side in (actual, reference))
    return actual, reference


def of_each_rank(actual: Any, reference: Any) -> tuple[Any, Any]:
    """The two sides by rank: a side that is not is repeated for each rank of the other."""
    if isinstance(actual, Mapping) and not isinstance(reference, Mapping):
        return actual, dict.fromkeys(actual, reference)
    if isinstance(reference, Mapping) and not isinstance(actual, Mapping):
        return dict.fromkeys(reference, actual), reference
    return actual, reference


#: Switches of torch's optimizers that choose a kernel of the same update.
_IMPLEMENTATIONS = ("foreach", "fused", "capturable")
#: seed_all() sets it. A run is the same under any seed unless it draws random numbers.
_SEED = "variables.PYTHONHASHSEED"


def without_implementations(settings: list[Setting]) -> tuple[list[Setting], list[str]]:
    """Settings that change what is computed; of the others, notes."""
    kept, notes = [], []
    for setting in settings:
        both = f"{setting.path} is {setting.actual} in actual and {setting.reference} in reference"
        if setting.path.rpartition(".")[2] in _IMPLEMENTATIONS and ".groups[" in setting.path:
            if NOT_THERE in setting:  # of another class, or of another release of torch
                continue
            notes.append(f"{both}: another kernel of the same update, whose results are compared")
        elif setting.path.endswith(_SEED):
            notes.append(f"{both}: a seed")
        else:
            kept.append(setting)
    return kept, notes


def by_name(value: Any, renaming: Renaming) -> Any:
    """The settings with renamed keys, and a group's parameters as a set: their order changes no
    update.
    """
    if isinstance(value, list):
        return [by_name(item, renaming) for item in value]
    if not isinstance(value, Mapping):
        return value
    renamed: dict[str, Any] = {}
    for key, item in value.items():
        if key in _BY_NAME and isinstance(item, Mapping):
            renamed[key] = {renaming(name): part for name, part in item.items()}
        elif key == "parameters" and isinstance(item, list):
            renamed[key] = {renaming(str(name)): "in the group" for name in item}
        else:
            renamed[key] = by_name(item, renaming)
    return renamed


def _differences(path: str, actual: Any, reference: Any) -> Iterator[Setting]:
    if isinstance(actual, Mapping) and isinstance(reference, Mapping):
        for key in [*reference, *(key for key in actual if key not in reference)]:
            if key in _NEVER and (not path or _OF_RANK.fullmatch(path)):
                continue
            below = f"{path}.{key}" if path else str(key)
            pair = [side.get(key, NOT_THERE) for side in (actual, reference)]
            yield from _differences(below, *pair)
    elif isinstance(actual, list) and isinstance(reference, list):
        if len(actual) != len(reference) and not _is_nested(actual) and not _is_nested(reference):
            yield setting_of(path, actual, reference)
            return
        for position in range(max(len(actual), len(reference))):
            pair = [
                side[position] if position < len(side) else NOT_THERE
                for side in (actual, reference)
            ]
            yield from _differences(f"{path}[{position}]", *pair)
    elif not _equal(actual, reference):
        yield setting_of(path, actual, reference)


def _is_nested(values: list[Any]) -> bool:
    return any(isinstance(value, (Mapping, list)) for value in values)


def _equal(left: Any, right: Any) -> bool:
    # Some writers of JSON turn 1.0 into 1, and a NaN equals a NaN here.
    same: bool = left == right or (left != left and right != right)
    return same and isinstance(left, bool) == isinstance(right, bool)


def setting_of(path: str, *values: Any) -> Setting:
    """The setting of two values that differ, numbers with 6 digits, or all where these agree."""
    texts = [f"{value:.6g}" if isinstance(value, float) else repr(value) for value in values]
    if texts[0] == texts[1]:
        texts = [repr(value) for value in values]
    texts = [value if isinstance(value, str) else text for value, text in zip(values, texts)]
    mine, other = (text if len(text) <= 60 else text[:57] + "..." for text in texts)
    return Setting(path, mine, other)
