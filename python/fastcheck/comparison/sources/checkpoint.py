"""Checkpoints as a side of a comparison: a file, a directory of them, or in memory."""

from __future__ import annotations

import contextlib
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from fastcheck.comparison.block import Block, Extra, Kind, Phase, Source
from fastcheck.comparison.names import Name, NameTable, Renaming
from fastcheck.errors import CompareError, UnsupportedTensorError, first_line, printable
from fastcheck.record.format import RECORD_DTYPE
from fastcheck.statistics.functions import stats
from fastcheck.utils.reading import read_json
from fastcheck.utils.text.layout import listed

from .distributed_checkpoint import is_distributed_checkpoint, shard_loaders
from .files import LONE, Loader, UntrustedError, loaders_of
from .formats import SUFFIXES, format_of

# Prefixes that trainers and torch's wrappers put before the names of a model's state_dict.
_WRAPPERS = {
    *("_fsdp_wrapped_module", "_orig_mod", "ema", "generator", "model", "model_state"),
    *("model_state_dict", "module", "net", "network", "params", "state_dict", "weights"),
}
_MAX_WRAPPERS = 4


def matching_prefixes(ours: Iterable[str], theirs: Iterable[str]) -> tuple[str, str]:
    """The wrappers of each side without which the most names are on both; "" where it is none.

    Names stay as they are where that has as many in common.
    """
    left, right = list(ours), list(theirs)
    best, common = ("", ""), len(set(left) & set(right))
    for mine in _prefixes(left):
        shown = {name.removeprefix(mine) for name in left}
        for other in _prefixes(right):
            count = sum(name.removeprefix(other) in shown for name in right)
            if count > common:
                best, common = (mine, other), count
    return best


def _prefixes(names: list[str]) -> list[str]:
    """``""`` and each row of wrappers that names begin with, the shortest first."""
    prefixes: Counter[str] = Counter()
    for name in names:
        prefix = ""
        for part in name.split(".")[:-1][:_MAX_WRAPPERS]:
            if part not in _WRAPPERS:
                break
            prefix += f"{part}."
            prefixes[prefix] += 1
    return ["", *sorted(prefixes, key=len)]


class MemorySource(Source):
    """Named tensors, each behind a function that loads it, and values beside them."""

    kind = Kind.CHECKPOINT

    def __init__(
        self, title: str, tensors: Mapping[str, Loader], values: Mapping[str, Any] | None = None
    ) -> None:
        self.title = title
        self.notes: list[str] = []
        #: The loader of each tensor, by name.
        self.tensors = dict(tensors)
        self.settings: dict[Phase, Any] = {Phase.HYPERPARAMETERS: dict(values or {}) or None}

    def unwrap(self, side: str, prefix: str) -> None:
        """Takes ``prefix`` off the names that begin with it, and notes that it did."""
        if prefix:
            self.tensors = {name.removeprefix(prefix): t for name, t in self.tensors.items()}
            self.notes.append(f"{side}: names are those below {prefix[:-1]}")

    def places(self) -> list[tuple[int, int]]:
        return [(0, 0)]

    def block(
        self, step: int, rank: int, names: NameTable, renaming: Renaming, is_first: bool
    ) -> Block:
        """Reads every tensor once."""
        tensors = []
        for name, load in self.tensors.items():
            path, part = renaming.place(name)
            number = names.number(Name("", "", "", path, "", part))
            phase = Phase.UPDATE if _is_state(name) else Phase.WEIGHTS
            tensors.append((number, phase, *record_of(load)))
        return Block.of(step, rank, tensors)


class RanksSource(Source):
    """The checkpoints of several ranks, each with its parts."""

    kind = Kind.CHECKPOINT

    def __init__(self, title: str, ranks: Sequence[MemorySource]) -> None:
        self.title = title
        self.notes = [note for source in ranks for note in source.notes]
        self.settings = ranks[0].settings
        self._ranks = ranks

    def places(self) -> list[tuple[int, int]]:
        return [(0, rank) for rank in range(len(self._ranks))]

    def block(
        self, step: int, rank: int, names: NameTable, renaming: Renaming, is_first: bool
    ) -> Block:
        return self._ranks[rank].block(step, rank, names, renaming, is_first)


_RANK = re.compile(r"rank[_-]?(\d+(?:_\d+)*)")


def rank_files(directory: str) -> list[str]:
    """The checkpoint files of a directory, where each is that of another rank by its name or that
    of its folder (``mp_rank_00/model.pt``), in the order of the ranks; else none.
    """
    if is_distributed_checkpoint(directory):
        return []
    numbers: dict[tuple[int, ...], str] = {}
    names = list(_files(directory))
    for name in names:
        matches = _RANK.findall(name)
        if len(matches) == 1:
            numbers[tuple(map(int, matches[0].split("_")))] = os.path.join(directory, name)
    is_by_rank = len(numbers) == len(names) > 1
    return [path for _, path in sorted(numbers.items())] if is_by_rank else []


class CheckpointSource(MemorySource):
    """A file, or all checkpoint files of a directory. CompareError when a file can't be read."""

    def __init__(self, path: str, trust: bool = False) -> None:
        if not os.path.isdir(path):
            tensors, values = loaders_of(path, trust)
            super().__init__(path, tensors, values)
            return
        if is_distributed_checkpoint(path):
            super().__init__(path, shard_loaders(path, trust))
            return
        opened: dict[str, tuple[dict[str, Loader], dict[str, Any]]] = {}
        left_out = []
        for name in sorted(_files(path)):
            try:
                opened[name] = loaders_of(os.path.join(path, name), trust)
            except UntrustedError:
                # A directory of Hugging Face's has pickled arguments beside the weights.
                left_out.append(f"{name} is left out: loading it would run code (trust=, --trust)")
        tensors, values = {}, {}
        inner = [name for part, _ in opened.values() for name in part if name != LONE]
        clash = len(set(inner)) < len(inner)
        for name, (part, settings) in opened.items():
            stem = os.path.splitext(name)[0].replace(os.sep, ".")
            for key, load in part.items():
                tensors[stem if key == LONE else f"{stem}.{key}" if clash else key] = load
            if settings:
                values[stem] = settings
        super().__init__(path, tensors, values)
        self.notes += [*left_out, *_absent_shards(path)]


def _absent_shards(directory: str) -> Iterator[str]:
    """Notes on the shards that an index of Hugging Face's names, and that are not there."""
    for name in sorted(os.listdir(directory)):
        if not name.endswith(".index.json"):
            continue
        try:
            shards = set(read_json(os.path.join(directory, name))["weight_map"].values())
            absent = [s for s in sorted(shards) if not os.path.exists(os.path.join(directory, s))]
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
        if absent:
            shown = listed([printable(shard) for shard in absent], 3, ", ...")
            yield f"{printable(name)} names files that are not there: {shown}"


def look_through_wrappers(actual: object, reference: object) -> None:
    """Takes off the names of two checkpoints the wrappers that one of them has, and the other not:
    ``state_dict.``, ``module.``, ...
    """
    if isinstance(actual, MemorySource) and isinstance(reference, MemorySource):
        mine, other = matching_prefixes(actual.tensors, reference.tensors)
        actual.unwrap("actual", mine)
        reference.unwrap("reference", other)


def _files(directory: str) -> Iterator[str]:
    for place, folders, names in os.walk(directory):
        folders[:] = [name for name in folders if not name.endswith("fastcheck.steps")]
        for name in names:
            path = os.path.join(place, name)
            is_ours = name.endswith(SUFFIXES)
            if not is_ours:
                with contextlib.suppress(OSError):
                    is_ours = format_of(path) not in (None, "mindspore")
            if is_ours:
                yield os.path.relpath(path, directory)


def _is_state(name: str) -> bool:
    parts = name.lower().split(".")
    return any(part.startswith("optim") for part in parts[:-1]) or parts[-1] in (
        "exp_avg",
        "exp_avg_sq",
        "momentum_buffer",
    )


def record_of(load: Loader) -> tuple[np.void, Extra]:
    """The Record of a tensor, row-major so that its layout doesn't matter, and the rest."""
    empty: np.void = np.zeros(1, RECORD_DTYPE)[0]
    try:
        tensor = load()
    except CompareError:
        raise
    except Exception as error:  # a damaged file may raise anything
        return empty, Extra(problem=first_line(error))
    shape = () if tensor.is_nested else tuple(tensor.shape)
    try:
        record = stats(tensor.detach(), record="full", order="logical").record
    except UnsupportedTensorError as error:
        return empty, Extra(shape=shape, problem=first_line(error))
    return record, Extra(shape=shape, load=load)
