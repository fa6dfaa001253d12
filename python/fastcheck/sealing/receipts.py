"""receipt() is a list of checksums of a model's weights; arrival() says which weights another model
holds otherwise: old, missing, cast, transposed, swapped, half written.
"""

from __future__ import annotations

import itertools
import math
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Optional, Union

import torch

from fastcheck.comparison.names import BUILT_IN, VOCABULARY, Renaming
from fastcheck.comparison.relation import constant_text, dtype_name, group_counts
from fastcheck.comparison.sources.checkpoint import CheckpointSource
from fastcheck.errors import CompareError, ConfigError, UnsupportedTensorError, choice
from fastcheck.statistics.functions import stats
from fastcheck.statistics.stats import Stats, StatsList
from fastcheck.utils.reading import read_json
from fastcheck.utils.torch.rank import own_rank
from fastcheck.utils.torch.readable import unreadable_reason

Map = Union[str, Mapping[str, Union[str, Sequence[str]]], None]

#: Larger tensors are read in so many parts, which tell where one is half written.
_PARTS = 4
_MANY = 4096
#: How many parts of a tensor are tried in another order.
_FEW = 3
#: Formats that weights are cast to on their way.
_CASTS = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Receipt:
    """The result of receipt(); ``to_dict()`` is ready for JSON."""

    tensors: Mapping[str, dict[str, Any]]
    unread: Mapping[str, str]

    def to_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON; verify() takes it too."""
        return {
            "fastcheck": "receipt",
            "format": 1,
            "tensors": dict(self.tensors),
            "unread": dict(self.unread),
        }


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
        return "\n".join([*lines, *self.notes, "verified" if self else "NOT VERIFIED"])


def receipt(
    model: Union[torch.nn.Module, Mapping[str, Any]],
    *,
    before: Union[Receipt, Mapping[str, Any], None] = None,
    vocabulary: Optional[int] = None,
) -> Receipt:
    """A list of the names, shapes, dtypes and checksums of a model's weights, to be compared
    with another model that should have them: ``fastcheck.verify(other, receipt)``.

        receipt = fastcheck.receipt(trainer_model)  # where weights are sent
        print(fastcheck.verify(engine_model, receipt, map="vllm"))  # where they arrive

    Args:
        model: a module, or its state_dict.
        before: the receipt of the weights that the other side had before: verify() then tells those
            that are old.
        vocabulary: the number of words, where embeddings and output layers have more rows: those
            behind it are padding, and left out. (Padding that only the other side has needs no
            option.)

    Raises:
        ConfigError: a model without tensors, or a ``before`` that is no receipt.

    Reads every tensor once, on its device (float32 and float64 three times, for what they are in
    bfloat16 and float16), and waits once. 130 to 260 bytes of JSON a tensor.
    """
    given = state_of(model)
    readable, unread = split_readable(given)
    if vocabulary is not None:
        at_least = "the number of words, of which embeddings have a row each"
        if isinstance(vocabulary, bool) or not isinstance(vocabulary, int) or vocabulary < 1:
            raise ConfigError("vocabulary can't be used", expected=at_least, got=repr(vocabulary))
        padded = [name for name in readable if VOCABULARY.search(name) and readable[name].dim()]
        readable.update({name: readable[name][:vocabulary] for name in padded})
    earlier = {} if before is None else _of(before).tensors
    slices: list[torch.Tensor] = []
    for tensor in readable.values():
        slices += [part for dtype in _formats(tensor) for part in _slices(tensor.to(dtype))]
    sums = iter(_checksums(slices))
    tensors: dict[str, dict[str, Any]] = {}
    first: dict[tuple[object, ...], str] = {}
    for name, tensor in readable.items():
        count = len(_slices(tensor))
        parts = {
            dtype_name(dtype): [next(sums) for _ in range(count)] for dtype in _formats(tensor)
        }
        entry: dict[str, Any] = {
            "shape": list(tensor.shape),
            "dtype": dtype_name(tensor.dtype),
            "parts": parts,
        }
        if name in earlier and earlier[name]["parts"] != parts:
            entry["before"] = earlier[name]["parts"]
        if tensor.numel() and (known := first.setdefault(place_of(tensor), name)) != name:
            entry["tied_to"] = known
        tensors[name] = entry
    return Receipt(tensors, unread)


def arrival(
    other: Union[torch.nn.Module, Mapping[str, Any], str, os.PathLike[str]],
    given: Union[Receipt, Mapping[str, Any], str, os.PathLike[str]],
    *,
    map: Map = None,
    accept: Sequence[str] = (),
    trust: bool = False,
) -> Arrival:
    """Holds a model, a state_dict or a checkpoint to a receipt; see verify()."""
    if isinstance(given, (str, os.PathLike)):
        given = read_json(os.fspath(given))
    wanted = _of(given).tensors
    if isinstance(other, (str, os.PathLike)):
        source = CheckpointSource(os.fspath(other), trust)
        state = {name: load() for name, load in source.tensors.items()}
    else:
        state = state_of(other)
    readable, unread = split_readable(state)
    if isinstance(map, str):
        choice("map", map, BUILT_IN, "a mapping")
    renaming = Renaming.of(map)
    checks = _Checks(wanted, "dtype" in accept, renaming.has_groups)
    unexpected, notes = [], []
    for name, sources in _sources(renaming, state, wanted).items():
        if name in unread and sources:
            checks.leave(name, sources, f"can't be read: {unread[name]}")
        elif name in unread:
            notes.append(f"{name} can't be read: {unread[name]}")
        elif sources:
            checks.hold(name, readable[name], sources)
        else:
            unexpected.append(name)
    if checks.padded:
        first, rows = next(iter(checks.padded.items()))
        others = f", nor those of {len(checks.padded) - 1:,} more" if len(checks.padded) > 1 else ""
        notes.append(f"{rows:,} rows of padding behind {first} are not verified{others}")
    if checks.grouped:
        first, groups = next(iter(checks.grouped.items()))
        others = f", as {len(checks.grouped) - 1:,} others" if len(checks.grouped) > 1 else ""
        notes.append(f"{first} has its parts in {groups:,} groups{others}")
    if not checks.seen:
        notes += _other_prefix(unexpected, wanted)
    arrived = set(checks.equal)
    missing = tuple(
        name
        for name, entry in wanted.items()
        if name not in checks.seen and entry.get("tied_to", name) not in arrived
    )
    return Arrival(
        own_rank(),
        len(checks.equal),
        checks.differing,
        missing,
        tuple(unexpected),
        tuple(notes),
        checks.cast,
    )


class _Checks:
    """Compares tensors with the entries of a receipt, one after another."""

    def __init__(
        self, wanted: Mapping[str, dict[str, Any]], accept: bool, has_groups: bool
    ) -> None:
        self._wanted, self._accepts_casts, self._has_groups = wanted, accept, has_groups
        self._by_content = {
            tuple(parts): name
            for name, entry in wanted.items()
            for parts in entry["parts"].values()
        }
        self.equal: list[str] = []
        self.cast = 0
        self.seen: set[str] = set()
        self.differing: dict[str, str] = {}
        #: By name, in how many groups its parts are divided.
        self.grouped: dict[str, int] = {}
        #: By name, how many rows are behind those of the vocabulary.
        self.padded: dict[str, int] = {}

    def leave(self, name: str, sources: Sequence[str], why: str) -> None:
        """Notes a tensor that is not compared with its sources, and why."""
        self.seen |= set(sources)
        self.differing[name] = why

    def hold(self, name: str, tensor: torch.Tensor, sources: Sequence[str]) -> None:
        self.seen |= set(sources)
        shapes = [self._wanted[source]["shape"] for source in sources]
        stacked = tensor.dim() - len(shapes[0])
        if len(shapes) > 1 and stacked > 0:  # one expert below the other
            tensor = tensor.flatten(0, stacked)
        if VOCABULARY.search(name) and (rows := _padding(tensor, shapes)):
            self.padded[name] = rows
            tensor = tensor[:-rows]
        if not _fits(tensor, shapes):
            text = " + ".join(str(tuple(shape)) for shape in shapes)
            self.differing[name] = f"its shape is {tuple(tensor.shape)}, expected {text}"
            return
        sizes = [shape[0] for shape in shapes] if len(shapes) > 1 else []
        differences: list[str] = []
        for groups in group_counts(sizes):
            tried = self._tried(tensor, sources, groups)
            differences = differences or tried
            if any(tried):
                continue
            if groups > 1 and not self._has_groups:
                text = f"its parts follow each other in {groups:,} groups, and are expected in one"
                self.differing[name] = text
                return
            if groups > 1:
                self.grouped.setdefault(name, groups)
            differences = tried
            break
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
                self.cast += dtype_name(piece.dtype) != self._wanted[source]["dtype"]
        if problems:
            self.differing[name] = "; ".join(problems)

    def _tried(self, tensor: torch.Tensor, sources: Sequence[str], groups: int) -> list[str]:
        """The problem of each of these parts, which follow each other in so many groups."""
        entries = [self._wanted[source] for source in sources]
        pieces = _pieces(tensor, [entry["shape"] for entry in entries], groups)
        return [self._problem(*part) for part in zip(pieces, entries, sources)]

    def _problem(self, tensor: torch.Tensor, entry: Mapping[str, Any], source: str) -> str:
        """The difference of a tensor from its entry, in words; "" where it is equal."""
        shape = list(tensor.shape)
        is_as_large = tensor.numel() == math.prod(entry["shape"])
        dense = tensor.reshape(entry["shape"]) if is_as_large else tensor
        dtype, parts, sealed = dtype_name(tensor.dtype), _parts(dense), entry["parts"]
        is_cast = dtype != entry["dtype"]
        cast = f"cast from {entry['dtype']} to {dtype}" if is_cast else ""
        if parts == sealed.get(dtype) or (is_cast and _widened(dense, entry)):
            if shape != entry["shape"]:
                return f"the same elements in the shape {tuple(shape)}"
            return "" if self._accepts_casts else cast
        and_ = f"{cast}, and " if cast else ""
        constant = constant_text(tensor)  # zeros are no sign of the weight that they come from
        holds = None if constant else self._by_content.get(tuple(parts))
        if holds not in (None, source):
            return f"{and_}it is {holds} of the receipt: swapped, or the map is wrong"
        if parts == entry.get("before", {}).get(dtype):
            return f"{and_}old: as in the receipt before"
        for first, other in itertools.combinations(range(tensor.dim()), 2):
            turned = tensor.transpose(first, other)
            if list(turned.shape) == entry["shape"] and _parts(turned) == sealed.get(dtype):
                which = "" if tensor.dim() == 2 else f": dimensions {first} and {other}"
                return f"{and_}transposed{which}"
        for format_ in _CASTS if not is_cast and tensor.is_floating_point() else ():
            narrow = tensor.to(format_)
            is_rounded = torch.equal(narrow.to(tensor.dtype), tensor)
            if is_rounded and _parts(narrow) == sealed.get(dtype_name(format_)):
                return f"rounded to {dtype_name(format_)}"
        if shape != entry["shape"]:
            text = f"its shape is {tuple(shape)}, expected {tuple(entry['shape'])}"
            is_cut = VOCABULARY.search(source) and shape[1:] == entry["shape"][1:]
            hint = f"; if the rows behind are padding: receipt(vocabulary={shape[0]})"
            return text + hint if is_cut else text
        return and_ + (_half(tensor, parts, entry) or constant or "other values")


def _widened(tensor: torch.Tensor, entry: Mapping[str, Any]) -> bool:
    """Whether it holds the numbers of a narrower dtype."""
    dtype = getattr(torch, entry["dtype"], None)
    if not isinstance(dtype, torch.dtype) or not tensor.is_floating_point():
        return False
    narrow = tensor.to(dtype)
    is_exact = torch.equal(narrow.to(tensor.dtype), tensor)
    return is_exact and _parts(narrow) == entry["parts"].get(entry["dtype"])


def _half(tensor: torch.Tensor, parts: Sequence[str], entry: Mapping[str, Any]) -> str:
    """The text on the other parts, where some are as they should be."""
    dtype = dtype_name(tensor.dtype)
    sealed = entry["parts"].get(dtype, [])
    right = [checksum == other for checksum, other in zip(parts, sealed)]
    if not any(right) or len(parts) != len(sealed):
        return ""
    texts, row, is_known = [], 0, False
    before = entry.get("before", {}).get(dtype, [None] * len(parts))
    for part, is_right, checksum, old in zip(_slices(tensor), right, parts, before):
        last = row + len(part) - 1
        if not is_right:
            what = "old" if checksum == old else "zeros" if not part.any() else ""
            rows = f"rows {row:,} to {last:,}"
            texts.append(f"{rows} are {what}" if what else f"other values in {rows}")
            is_known |= bool(what)
        row = last + 1
    name = "half written: " if is_known else ""
    return f"{name}{', '.join(texts)}; the others are equal to the bit"


# ---- what is read -------------------------------------------------------------------------------


def state_of(
    model: object,
    refused: str = "there are no weights to read",
    kinds: tuple[type, ...] = (torch.Tensor,),
) -> dict[str, Any]:
    """The tensors of a module or a state_dict, or what else is of these kinds. ``refused``: the
    text of the ConfigError where there is none.
    """
    given = model.state_dict() if isinstance(model, torch.nn.Module) else model
    pairs = given.items() if isinstance(given, Mapping) else ()
    state = {str(key): value for key, value in pairs if isinstance(value, kinds)}
    if not state:
        expected = "a torch.nn.Module with parameters or buffers, or its state_dict()"
        raise ConfigError(refused, expected=expected, got=type(model).__name__)
    return state


def place_of(tensor: torch.Tensor) -> tuple[object, ...]:
    """The place of a tensor's elements: that of a tied weight is the same."""
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def split_readable(
    state: Mapping[str, torch.Tensor],
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors that can be read, and the reasons why others can't be, by name."""
    reasons = {name: unreadable_reason(tensor) for name, tensor in state.items()}
    readable = {name: state[name].detach() for name, why in reasons.items() if why is None}
    return readable, {name: why for name, why in reasons.items() if why is not None}


def read_all(state: Mapping[str, torch.Tensor]) -> tuple[dict[str, Stats], dict[str, str]]:
    """Each tensor's statistics, read and waited for in one call for each device; and why others
    can't be read.
    """
    tensors, unread = split_readable(state)
    by_device: dict[torch.device, list[str]] = {}
    for key, tensor in tensors.items():
        by_device.setdefault(tensor.device, []).append(key)
    statistics: dict[str, Stats] = {}
    for keys in by_device.values():
        try:
            statistics.update(zip(keys, stats([tensors[k] for k in keys], order="logical")))
        except UnsupportedTensorError as error:
            unread.update(dict.fromkeys(keys, str(error)))
    return {key: statistics[key] for key in state if key in statistics}, unread


def _formats(tensor: torch.Tensor) -> Sequence[torch.dtype]:
    """The dtypes to try for a tensor, its own first."""
    is_wide = tensor.dtype in (torch.float32, torch.float64)
    return (tensor.dtype, *(_CASTS if is_wide else ()))


def _slices(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    if tensor.numel() < _MANY or tensor.shape[0] < _PARTS:
        return [tensor]
    return tensor.tensor_split(_PARTS)


def _parts(tensor: torch.Tensor) -> list[str]:
    return _checksums(_slices(tensor))


def _checksums(slices: Sequence[torch.Tensor]) -> list[str]:
    """A call for each device; all are waited for at the end."""
    places: dict[torch.device, list[int]] = {}
    for place, part in enumerate(slices):
        places.setdefault(part.device, []).append(place)
    checksums = [""] * len(slices)
    read: list[tuple[list[int], StatsList]] = [
        (own, stats([slices[place] for place in own], order="logical")) for own in places.values()
    ]
    for own, rows in read:
        for place, record in zip(own, rows.numpy()):
            checksums[place] = f"{int(record['checksum']):016x}"
    return checksums


def _fits(tensor: torch.Tensor, shapes: Sequence[Sequence[int]]) -> bool:
    """Whether the tensor has the rows of each of these shapes, one below the other."""
    if len(shapes) == 1:
        return True
    fits = all(shape and list(shape[1:]) == list(tensor.shape[1:]) for shape in shapes)
    return fits and tensor.dim() > 0 and sum(shape[0] for shape in shapes) == tensor.shape[0]


def _padding(tensor: torch.Tensor, shapes: Sequence[Sequence[int]]) -> int:
    """The number of its rows behind those of a shape that is otherwise its own."""
    (shape, *others) = shapes
    if others or not shape or tensor.dim() != len(shape) or list(tensor.shape[1:]) != shape[1:]:
        return 0
    return max(tensor.shape[0] - shape[0], 0)


def _pieces(
    tensor: torch.Tensor, shapes: Sequence[Sequence[int]], groups: int
) -> Sequence[torch.Tensor]:
    """The tensor in the rows of each of these shapes, which follow each other in each group."""
    if len(shapes) == 1:
        return [tensor]
    rows = tensor.reshape(groups, -1, *tensor.shape[1:])
    ends = itertools.accumulate(shape[0] // groups for shape in shapes[:-1])
    return [piece.flatten(0, 1) for piece in rows.tensor_split(list(ends), 1)]


# ---- names --------------------------------------------------------------------------------------


def _sources(
    renaming: Renaming, state: Mapping[str, Any], wanted: Mapping[str, Any]
) -> dict[str, list[str]]:
    """The names of the receipt that each tensor is made of; none where the receipt has none."""
    parts: dict[str, list[tuple[tuple[int, ...], str]]] = {}
    for name in wanted:
        whole, part = renaming.of_reference().place(name)
        parts.setdefault(whole, []).append((part, name))
    return {name: [part for _, part in sorted(parts.get(renaming(name), []))] for name in state}


def _other_prefix(names: Sequence[str], wanted: Mapping[str, Any]) -> list[str]:
    """The map to give, where most names of one side are those of the other behind a prefix."""
    for inner, outer, form in ((wanted, names, '"{}*": "*"'), (set(names), wanted, '"*": "{}*"')):
        ends = ((name, dot.end()) for name in outer for dot in re.finditer(r"\.", name))
        prefixes = Counter(name[:end] for name, end in ends if name[end:] in inner)
        for prefix, count in prefixes.most_common(1):
            if 2 * count > len(outer):
                return [f"the names begin otherwise: map={{{form.format(prefix)}}}"]
    return []


def _of(given: object) -> Receipt:
    if isinstance(given, Receipt):
        return given
    is_known = isinstance(given, Mapping) and given.get("fastcheck") == "receipt"
    tensors = given.get("tensors") if isinstance(given, Mapping) else None
    if (
        not is_known
        or not isinstance(tensors, Mapping)
        or not all(map(_is_entry, tensors.values()))
    ):
        raise CompareError(
            "this is not a receipt",
            expected="what fastcheck.receipt(model) returns, its to_dict(), or JSON of that",
            got=type(given).__name__,
        )
    return Receipt(tensors, {})


def _is_entry(entry: Any) -> bool:
    return (
        isinstance(entry, Mapping)
        and isinstance(entry.get("dtype"), str)
        and isinstance(entry.get("shape"), list)
        and isinstance(entry.get("parts"), Mapping)
    )
