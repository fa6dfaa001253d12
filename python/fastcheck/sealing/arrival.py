"""arrival() compares a model's weights with a receipt, and says which it holds otherwise: old,
missing, cast, transposed, swapped, half written.
"""

from __future__ import annotations

import itertools
import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Union

import torch

from fastcheck.comparison.names import BUILT_IN, VOCABULARY, Renaming
from fastcheck.comparison.relation import constant_text, dtype_name, group_counts
from fastcheck.comparison.sources.checkpoint import CheckpointSource
from fastcheck.errors import choice, printable
from fastcheck.utils.torch.rank import group_size, own_rank

from . import reading
from .receipts import Receipt, read_document, read_receipt

Given = Union[Receipt, Mapping[str, Any], str, os.PathLike[str]]
Map = Union[str, Mapping[str, Union[str, Sequence[str]]], None]

#: The number of parts of a tensor that are tried in another order.
_FEW = 3


@dataclass(frozen=True)
class Arrival:
    """The result of verify(model, receipt). ``bool()`` of it: every weight of the receipt is there
    and equal to the bit (or cast, where that was allowed).

    ``equal``: how many are, ``cast`` of them cast. ``differing``: by name in the other model, what
    is wrong. ``missing``: names of the receipt that nothing holds. ``unexpected``: names that the
    receipt does not have.
    """

    rank: int
    equal: int
    differing: dict[str, str]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    notes: tuple[str, ...] = ()
    cast: int = 0

    def __bool__(self) -> bool:
        return bool(self.equal) and not (self.differing or self.missing)

    def __str__(self) -> str:
        count = f"{self.equal - self.cast:,} weights are equal to the bit"
        count += f", {self.cast:,} are cast" if self.cast else ""
        lines = [f"rank {self.rank}: {count}" if self.rank else count]
        lines += [f"{name}: {text}" for name, text in self.differing.items()]
        lines += [f"{name}: missing" for name in self.missing]
        lines += [f"{name}: not in the receipt" for name in self.unexpected]
        lines += [*self.notes, "verified" if self else "NOT VERIFIED"]
        return printable("\n".join(lines), keep="\n")


def arrival(
    other: Union[torch.nn.Module, Mapping[str, Any], str, os.PathLike[str]],
    given: Union[Given, Sequence[Given]],
    *,
    map: Map = None,
    accept: Sequence[str] = (),
    trust: bool = False,
) -> Arrival:
    """Holds a model, a state_dict or a checkpoint to a receipt; see verify()."""
    is_list = isinstance(given, Sequence) and not isinstance(given, str)
    several: Any = given if is_list and given else [given]
    receipts = [_read(one).tensors for one in several]
    for option in accept:
        choice("accept", option, ("dtype",))
    if isinstance(other, (str, os.PathLike)):
        source = CheckpointSource(os.fspath(other), trust)
        state = {name: load() for name, load in source.tensors.items()}
    else:
        state = reading.own_parts(other)
    readable, unread = reading.split_readable(state)
    if not isinstance(map, (Mapping, type(None))):
        choice("map", map, BUILT_IN, "a mapping")
    renaming = Renaming.of(map)
    units = [list(_units(renaming, state, wanted)) for wanted in receipts]
    options = "dtype" in accept, renaming.has_groups, _read_at_once(readable, receipts, units)
    checks = [_Checks(wanted, *options) for wanted in receipts]
    unexpected, notes = Counter[str](), dict[str, None]()
    for own, pairs in zip(checks, units):
        for names, sources in pairs:
            bad = [f"can't be read: {unread[name]}" for name in names if name in unread]
            label = names[0] if len(names) == 1 else sources[0]
            if bad and sources:
                own.leave(label, sources, bad[0])
            elif bad:
                notes[f"{label} {bad[0]}"] = None
            elif not sources:
                unexpected.update(names)
            else:
                tensors: Sequence[torch.Tensor] = [readable[name] for name in names]
                if is_list and len(sources) == 1:
                    tensors = _of_rank(tensors, checks, own, sources[0])
                own.join(label, tensors, sources)
        notes.update(dict.fromkeys(own.settle(list(unexpected))))
    return _result(checks, unexpected, tuple(notes))


def _read(given: Given) -> Receipt:
    if isinstance(given, (str, os.PathLike)):
        return read_receipt(read_document(os.fspath(given), "the receipt"))
    return read_receipt(given)


def _read_at_once(
    readable: Mapping[str, torch.Tensor],
    receipts: Sequence[Mapping[str, Any]],
    units: Sequence[Sequence[tuple[list[str], list[str]]]],
) -> dict[tuple[object, ...], str]:
    """The checksums, by place, of the tensors that are compared as they are: all are read in one
    call, and waited for once.
    """
    whole = [
        readable[names[0]]
        for wanted, pairs in zip(receipts, units)
        for names, sources in pairs
        if len(names) == len(sources) == 1 and names[0] in readable
        if list(readable[names[0]].shape) == wanted[sources[0]]["shape"]
    ]
    return dict(zip([reading.place_of(tensor) for tensor in whole], reading.checksum_texts(whole)))


def _result(checks: Sequence[_Checks], unexpected: Counter[str], notes: tuple[str, ...]) -> Arrival:
    ends = [f" on rank {rank}" if rank or len(checks) > 1 else "" for rank in range(len(checks))]
    return Arrival(
        own_rank(),
        sum(len(own.equal) for own in checks),
        {f"{name}{end}": t for own, end in zip(checks, ends) for name, t in own.differing.items()},
        tuple(f"{name}{end}" for own, end in zip(checks, ends) for name in own.missing),
        tuple(name for name, count in unexpected.items() if count == len(checks)),
        notes,
        sum(own.cast for own in checks),
    )


class _Checks:
    """Compares tensors with the entries of a receipt, in turn."""

    def __init__(
        self,
        wanted: Mapping[str, dict[str, Any]],
        accept: bool,
        has_groups: bool,
        known: Mapping[tuple[object, ...], str],
    ) -> None:
        self.wanted, self._accepts_casts, self._has_groups = wanted, accept, has_groups
        #: Results that were read of a tensor already, by place.
        self._known = known
        self._by_content = {
            parts: name for name, entry in wanted.items() for parts in entry["parts"].values()
        }
        self.equal: list[str] = []
        self.cast = 0
        self.seen: set[str] = set()
        self.differing: dict[str, str] = {}
        #: The number of groups in which a tensor's parts are divided, by name.
        self.grouped: dict[str, int] = {}
        #: The number of rows behind those of the vocabulary, by name.
        self.padded: dict[str, int] = {}
        of_shards: dict[tuple[int, int], dict[str, Any]] = {}
        for name, entry in wanted.items():
            for dim, shards in entry.get("shards", {}).items():
                divided = list(entry["shape"])
                divided[int(dim)] //= len(shards)
                for rank, parts in enumerate(shards):
                    own = {"shape": divided, "dtype": entry["dtype"], "parts": parts}
                    of_shards.setdefault((int(dim), rank), {})[name] = own
        #: The checks of shards, by dimension and rank; and the dimension of a tensor, by name.
        self._shards = {
            key: _Checks(own, accept, has_groups, known) for key, own in of_shards.items()
        }
        self._dims: dict[str, int] = {}

    def settle(self, unexpected: Sequence[str]) -> list[str]:
        """Notes on what was found. Of shards it takes those of this rank, where the process group
        has as many ranks, or of the rank of which fewest differ.
        """
        notes = []
        if self._dims:
            shards, dims = self._shards, self._dims.items()
            told = [
                {n: text for n, dim in dims if (text := shards[dim, at].differing.get(n))}
                for at in range(1 + max(at for _, at in shards))
            ]
            rank = min(range(len(told)), key=lambda at: len(told[at]))
            rank = own_rank() if group_size() == len(told) else rank
            for name, text in told[rank].items():
                owners = [at for at, names in enumerate(told) if name not in names]
                self.differing[name] = f"it is the shard of rank {owners[0]}" if owners else text
            for own in (shards[dim, rank] for dim in set(self._dims.values())):
                self.equal += own.equal
                self.cast += own.cast
                self.grouped.update(own.grouped)
            which = f"shards of rank {rank} of {len(told)}"
            notes.append(f"{len(dims):,} of its tensors are the {which}")
        if self.padded:
            first, rows = next(iter(self.padded.items()))
            others = f", nor those of {len(self.padded) - 1:,} more" if len(self.padded) > 1 else ""
            notes.append(f"{rows:,} rows of padding behind {first} are not verified{others}")
        if self.grouped:
            first, groups = next(iter(self.grouped.items()))
            others = f", as {len(self.grouped) - 1:,} others" if len(self.grouped) > 1 else ""
            notes.append(f"{first} has its parts in {groups:,} groups{others}")
        return notes if self.seen else [*notes, *_other_prefix(unexpected, self.wanted)]

    @property
    def missing(self) -> list[str]:
        """Names of the receipt that nothing was compared with."""
        arrived = set(self.equal)
        return [
            name
            for name, entry in self.wanted.items()
            if name not in self.seen and entry.get("tied_to", name) not in arrived
        ]

    def leave(self, name: str, sources: Sequence[str], why: str) -> None:
        """Notes a tensor that is not compared with its sources, and why."""
        self.seen |= set(sources)
        self.differing[name] = why

    def join(self, name: str, tensors: Sequence[torch.Tensor], sources: Sequence[str]) -> None:
        """Compares a tensor with its sources, or the parts of a fused tensor with that."""
        if len(tensors) == 1:
            self.hold(name, tensors[0], sources)
            return
        shapes = [list(tensor.shape) for tensor in tensors]
        if any(not shape or shape[1:] != shapes[0][1:] for shape in shapes):
            text = " + ".join(str(tuple(shape)) for shape in shapes)
            self.leave(name, sources, f"its parts have the shapes {text}")
            return
        entry, sizes = self.wanted[sources[0]], [shape[0] for shape in shapes]
        for groups in (*(group_counts(sizes) if self._has_groups else ()), 1):
            whole = _joined(tensors, groups, entry["shape"])
            if not self._problem(whole, entry, sources[0]):
                break
        if groups > 1:
            self.grouped.setdefault(name, groups)
        self.hold(name, whole, sources)

    def hold(self, name: str, tensor: torch.Tensor, sources: Sequence[str]) -> None:
        """Compares a tensor, which may be a rank's shard, with its sources, one below the other."""
        self.seen |= set(sources)
        shapes = [self.wanted[source]["shape"] for source in sources]
        stacked = tensor.dim() - len(shapes[0])
        if len(shapes) > 1 and stacked > 0:  # one expert below the other
            tensor = tensor.flatten(0, stacked)
        if VOCABULARY.search(name) and (rows := _padding(tensor, shapes)):
            self.padded[name] = rows
            tensor = tensor[:-rows]
        if self._is_shard(name, tensor, sources):
            return
        if not _fits(tensor, shapes):
            text = " + ".join(str(tuple(shape)) for shape in shapes)
            self.differing[name] = f"its shape is {tuple(tensor.shape)}, expected {text}"
            return
        sizes = [shape[0] for shape in shapes] if len(shapes) > 1 else []
        groups, differences = self._in_groups(tensor, sources, sizes)
        if groups > 1 and not self._has_groups:
            text = f"its parts follow each other in {groups:,} groups, and are expected in one"
            self.differing[name] = text
            return
        if groups > 1:
            self.grouped.setdefault(name, groups)
        if all(differences) and len(set(sizes)) > 1 and len(sizes) <= _FEW:
            for order in itertools.permutations(sources):
                if not any(self._tried(tensor, order, 1)):
                    self.differing[name] = f"its parts are in the order {', '.join(order)}"
                    return
        problems = []
        for source, piece, problem in zip(sources, _pieces(tensor, shapes, 1), differences):
            if problem:
                problems.append(problem if len(sources) == 1 else f"{source} in it: {problem}")
            else:
                self.equal.append(source)
                self.cast += dtype_name(piece.dtype) != self.wanted[source]["dtype"]
        if problems:
            self.differing[name] = "; ".join(problems)

    def _is_shard(self, name: str, tensor: torch.Tensor, sources: Sequence[str]) -> bool:
        """True if it has the shape of a rank's shard; it is compared with those of all ranks."""
        for (dim, _), shards in self._shards.items():
            own = [shards.wanted[source]["shape"] for source in sources if source in shards.wanted]
            is_one = len(own) == 1 and own[0] == list(tensor.shape)
            if len(own) == len(sources) and (is_one or (own[1:] and _fits(tensor, own))):
                shards.hold(name, tensor, sources)
                self._dims[name] = dim
        return name in self._dims

    def _in_groups(
        self, tensor: torch.Tensor, sources: Sequence[str], sizes: Sequence[int]
    ) -> tuple[int, list[str]]:
        """The number of groups in which the parts are equal, or else 1; and each part's problem."""
        first: list[str] = []
        for groups in group_counts(sizes):
            tried = self._tried(tensor, sources, groups)
            if not any(tried):
                return groups, tried
            first = first or tried
        return 1, first

    def _tried(self, tensor: torch.Tensor, sources: Sequence[str], groups: int) -> list[str]:
        """The problem of each of these parts, which follow each other in so many groups."""
        entries = [self.wanted[source] for source in sources]
        pieces = _pieces(tensor, [entry["shape"] for entry in entries], groups)
        return [self._problem(*part) for part in zip(pieces, entries, sources)]

    def _problem(self, tensor: torch.Tensor, entry: Mapping[str, Any], source: str) -> str:
        """The difference of a tensor from its entry, in words; "" where it is equal."""
        shape = list(tensor.shape)
        is_as_large = tensor.numel() == math.prod(entry["shape"])
        dense = tensor.reshape(entry["shape"]) if is_as_large else tensor
        dtype, sealed = dtype_name(tensor.dtype), entry["parts"]
        parts = self._known.get(reading.place_of(dense)) or reading.checksum_text(dense)
        is_cast = dtype != entry["dtype"]
        cast = f"cast from {entry['dtype']} to {dtype}" if is_cast else ""
        if parts == sealed.get(dtype) or (
            is_cast and _holds(dense, getattr(torch, entry["dtype"], None), entry)
        ):
            if shape != entry["shape"]:
                return f"the same elements in the shape {tuple(shape)}"
            return "" if self._accepts_casts else cast
        if is_cast and parts == sealed.get(entry["dtype"]):
            return f"the bits of {entry['dtype']}, read as {dtype}"
        and_ = f"{cast}, and " if cast else ""
        constant = constant_text(tensor)  # zeros are no sign of the weight that they come from
        holds = None if constant else self._by_content.get(parts)
        if holds not in (None, source):
            return f"{and_}it is {holds} of the receipt: swapped, or the map is wrong"
        if parts == entry.get("before", {}).get(dtype):
            return f"{and_}old: as in the receipt before"
        for first, other in itertools.combinations(range(tensor.dim()), 2):
            turned = tensor.transpose(first, other)
            has_shape = list(turned.shape) == entry["shape"]
            if has_shape and reading.checksum_text(turned) == sealed.get(dtype):
                which = "" if tensor.dim() == 2 else f": dimensions {first} and {other}"
                return f"{and_}transposed{which}"
        for format_ in reading.CASTS if not is_cast and tensor.is_floating_point() else ():
            if _holds(tensor, format_, entry):
                return f"rounded to {dtype_name(format_)}"
        if shape != entry["shape"]:
            text = f"its shape is {tuple(shape)}, expected {tuple(entry['shape'])}"
            is_cut = shape[1:] == entry["shape"][1:] and [] < shape < entry["shape"]
            is_cut &= VOCABULARY.search(source) is not None
            hint = f"; if the rows behind are padding: receipt(vocabulary={shape[0]})"
            return text + hint if is_cut else text
        return and_ + (_half(tensor, parts, entry) or constant or "other values")


def _holds(tensor: torch.Tensor, dtype: object, entry: Mapping[str, Any]) -> bool:
    """True if it holds the numbers of an entry in another dtype."""
    if not isinstance(dtype, torch.dtype) or tensor.is_complex():
        return False
    narrow = tensor.to(dtype)
    is_exact = torch.equal(narrow.to(tensor.dtype), tensor)
    return is_exact and reading.checksum_text(narrow) == entry["parts"].get(dtype_name(dtype))


def _half(tensor: torch.Tensor, parts: str, entry: Mapping[str, Any]) -> str:
    """The text on the other parts, where some are as they should be."""
    dtype = dtype_name(tensor.dtype)
    own, sealed, before = (
        re.findall("." * reading.OF_PART, given[reading.DIGITS :])
        for given in (parts, entry["parts"].get(dtype, ""), entry.get("before", {}).get(dtype, ""))
    )
    right = [checksum == other for checksum, other in zip(own, sealed)]
    if not any(right):
        return ""
    slices = reading.slices_of(tensor)
    ends = list(itertools.accumulate(map(len, slices), initial=0))
    rows = [f"rows {end:,} to {last - 1:,}" for end, last in zip(ends, ends[1:])]
    texts, is_half = [], False
    for place, (part, checksum, old) in enumerate(itertools.zip_longest(slices, own, before)):
        if right[place]:
            continue
        what = "old" if checksum == old else "zeros" if not part.any() else ""
        is_half |= bool(what)
        if not what and checksum in sealed and not constant_text(part):
            what = rows[sealed.index(checksum)]
        texts.append(f"{rows[place]} are {what}" if what else f"other values in {rows[place]}")
    name = "half written: " if is_half else ""
    return f"{name}{', '.join(texts)}; the others are equal to the bit"


def _fits(tensor: torch.Tensor, shapes: Sequence[Sequence[int]]) -> bool:
    """True if the tensor has the rows of each of these shapes, one below the other."""
    if len(shapes) == 1:
        return True
    fits = all(shape and list(shape[1:]) == list(tensor.shape[1:]) for shape in shapes)
    return fits and tensor.dim() > 0 and sum(shape[0] for shape in shapes) == tensor.shape[0]


def _padding(tensor: torch.Tensor, shapes: Sequence[Sequence[int]]) -> int:
    """The number of its rows behind those of a shape that is otherwise its own; 0 where they are
    more than half as many as those, and rather the shards of other ranks.
    """
    (shape, *others) = shapes
    if others or not shape or tensor.dim() != len(shape) or list(tensor.shape[1:]) != shape[1:]:
        return 0
    rows: int = tensor.shape[0] - shape[0]
    return rows if 0 < 2 * rows <= shape[0] else 0


def _pieces(
    tensor: torch.Tensor, shapes: Sequence[Sequence[int]], groups: int
) -> Sequence[torch.Tensor]:
    """The tensor in the rows of each of these shapes, which follow each other in each group."""
    if len(shapes) == 1:
        return [tensor]
    rows = tensor.reshape(groups, -1, *tensor.shape[1:])
    ends = itertools.accumulate(shape[0] // groups for shape in shapes[:-1])
    return [piece.flatten(0, 1) for piece in rows.tensor_split(list(ends), 1)]


def _joined(tensors: Sequence[torch.Tensor], groups: int, shape: Sequence[int]) -> torch.Tensor:
    """The tensors below each other, in each group; stacked as in a shape of as many elements
    whose rows are as long.
    """
    rows = [tensor.reshape(groups, -1, *tensor.shape[1:]) for tensor in tensors]
    whole = torch.cat(rows, 1).flatten(0, 1)
    shared = min(whole.dim(), len(shape)) - 1
    is_stack = list(whole.shape[whole.dim() - shared :]) == list(shape[len(shape) - shared :])
    return whole.reshape(shape) if is_stack and whole.numel() == math.prod(shape) else whole


def _of_rank(
    tensors: Sequence[torch.Tensor], checks: Sequence[_Checks], own: _Checks, source: str
) -> Sequence[torch.Tensor]:
    """A rank's shards of tensors that follow each other and make up the receipts' tensor ``source``
    on the ranks. The tensors, where the ranks have all of it.
    """
    holders = [one for one in checks if source in one.wanted]
    shapes, rank = [one.wanted[source]["shape"] for one in holders], holders.index(own)
    is_whole = len(shapes) < 2 or not all(tensor.dim() for tensor in tensors)
    whole = [] if is_whole else [sum(map(len, tensors)), *tensors[0].shape[1:]]
    for dim, size in enumerate(whole):
        rest = [[*shape[:dim], *shape[dim + 1 :]] for shape in (whole, *shapes)]
        if rest.count(rest[0]) < len(rest) or sum(shape[dim] for shape in shapes) != size:
            continue
        first, last = (sum(shape[dim] for shape in shapes[:n]) for n in (rank, rank + 1))
        return [
            tensor.narrow(dim, held * first // size, held * last // size - held * first // size)
            for tensor in tensors
            for held in [tensor.shape[dim]]
        ]
    return tensors


def _units(
    renaming: Renaming, state: Mapping[str, Any], wanted: Mapping[str, Any]
) -> Iterator[tuple[list[str], list[str]]]:
    """Names of the other model, and those of the receipt that they are compared with, none where it
    has none: a name with its own, a fused tensor with its parts, or its parts with it.
    """
    found: dict[str, tuple[list[Any], list[Any]]] = {}
    for side, (names, own) in enumerate(((state, renaming), (wanted, renaming.of_reference()))):
        for name in names:
            whole, part = own.place(name)
            found.setdefault(whole, ([], []))[side].append((part, name))
    for mine, theirs in found.values():
        sources = [name for _, name in sorted(theirs)]
        if len(mine) > 1 and len(sources) == 1 and all(part for part, _ in mine):
            yield [name for _, name in sorted(mine)], sources
            continue
        by_part = dict(theirs)
        for part, name in mine:
            yield [name], [by_part[part]] if part in by_part else sources


def _other_prefix(names: Sequence[str], wanted: Mapping[str, Any]) -> list[str]:
    """The map to give, where most names of one side are those of the other behind a prefix."""
    for inner, outer, form in ((wanted, names, '"{}*": "*"'), (set(names), wanted, '"*": "{}*"')):
        ends = ((name, dot.end()) for name in outer for dot in re.finditer(r"\.", name))
        prefixes = Counter(name[:end] for name, end in ends if name[end:] in inner)
        for prefix, count in prefixes.most_common(1):
            if 2 * count > len(outer):
                return [f"the names begin otherwise: map={{{form.format(prefix)}}}"]
    return []
