"""Weights that don't move, gradients that aren't there, and buffers that move although they never
did: told from the records that are made before every update anyway.

The host notes what only it knows (learning rates, which gradients are None); the rest is decided
where the records arrive, a few NumPy operations for each update. docs/guide.md says when nothing is
said.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Callable

import numpy as np

from ._history import History
from ._record import DTYPES, Flag
from ._site import Site, SiteTable

__all__ = ["UPDATES", "Look", "Movement"]

#: So many updates in a row have to agree.
UPDATES = 10
#: ... where nothing of what an optimizer holds has moved: perhaps it does nothing yet, on purpose.
UPDATES_OF_NONE = 100

_NAMED = 5
_COMPONENTS = np.array([info.components for info in DTYPES], np.int64)
# A gradient smaller than this many roundings of the largest one of the update is what cancellation
# has left of a sum that is 0 in truth (of a bias before a normalisation, of the keys' bias in
# attention): it need not move anything.
_ROUNDINGS = 8
_EPSILON = {"float64": 2.0**-52, "float16": 2.0**-10, "bfloat16": 2.0**-7, "complex128": 2.0**-52}
_SPACING = np.array([_EPSILON.get(info.name, 2.0**-23) for info in DTYPES])
_OTHER, _PARAMETER, _GRADIENT, _BUFFER = range(4)
_KINDS = {"param": _PARAMETER, "param_grad": _GRADIENT, "buffer": _BUFFER}


class Look:
    """What the host knows of one update: which records are about it, and of each parameter and
    buffer, by the number of its site, what no record tells.
    """

    __slots__ = (
        "buffers",
        "calls",
        "first",
        "has_gradient",
        "is_certain",
        "is_exempt",
        "is_live",
        "is_part",
        "is_training",
        "parameters",
        "stop",
        "strays",
    )

    def __init__(self) -> None:
        #: Sequence numbers.
        self.first = self.stop = 0
        #: Whether an update is about to be applied; not where a training loop says no more than
        #: that a step is over.
        self.is_certain = True
        self.parameters: list[int] = []
        #: Trained, and at a learning rate that is not 0.
        self.is_live: list[bool] = []
        self.has_gradient: list[bool] = []
        #: Other ranks hold the rest of it.
        self.is_part: list[bool] = []
        self.buffers: list[int] = []
        self.is_training: list[bool] = []
        #: How often its module has been called.
        self.calls: list[int] = []
        #: Of a module whose statistics may stand still for as long as it likes.
        self.is_exempt: list[bool] = []
        #: Parameters with a gradient that no optimizer holds.
        self.strays: list[int] = []


class _Table:
    """Arrays by site number, which grow with the number of sites."""

    _COLUMNS = (
        ("kind", np.int8),
        ("parameter", np.int32),
        ("is_known", np.bool_),
        ("checksum", np.uint64),
        ("numel", np.int64),
        ("is_pending", np.bool_),
        ("has_moved", np.bool_),
        ("idle", np.int32),
        ("idle_alone", np.int32),
        ("no_gradient", np.int32),
        ("constant", np.int32),
        ("was_training", np.bool_),
        ("calls", np.int64),
        ("is_said", np.bool_),
    )

    def __init__(self) -> None:
        self.size = 0
        self.columns = {name: np.zeros(0, dtype) for name, dtype in self._COLUMNS}

    def __getitem__(self, name: str) -> np.ndarray:
        return self.columns[name]

    def grow(self, size: int) -> None:
        for name, column in self.columns.items():
            self.columns[name] = np.concatenate([column, np.zeros(size - self.size, column.dtype)])
        self.size = size


class _Columns:
    """Fields of chosen records. Indexing the records would copy all of each, field by field."""

    __slots__ = ("_chosen", "_records")

    def __init__(self, records: np.ndarray, chosen: np.ndarray) -> None:
        self._records = records
        self._chosen = np.flatnonzero(chosen)

    def __getitem__(self, name: str) -> np.ndarray:
        column: np.ndarray = self._records[name][self._chosen]
        return column


class Movement:
    """``settle`` is called with the ledger's lock held, where an update's records are on the host;
    the rest by any thread.
    """

    def __init__(
        self, sites: SiteTable, history: History, trouble: Callable[[str, Exception], None]
    ) -> None:
        self._sites = sites
        self._history = history
        self._trouble = trouble
        self._table = _Table()
        self._parameter_of: dict[tuple[str, str], int] = {}
        self._stray_checksums: dict[int, int] = {}
        self._lock = threading.Lock()
        self._unsaid: list[str] = []
        #: All that was said, for summary().
        self.notes: list[str] = []
        self.is_on = True

    def take_unsaid(self) -> Sequence[str]:
        """What is to be said as a warning, once."""
        if not self._unsaid:
            return ()
        with self._lock:
            texts, self._unsaid = self._unsaid, []
        return texts

    def settle(self, look: Look) -> None:
        """The records of the look are here. Never raises."""
        if not self.is_on:
            return
        try:
            self._settle(look)
        except Exception as error:
            self.is_on = False
            self._trouble("whether weights move", error)

    def _settle(self, look: Look) -> None:
        records = self._history.between(look.first, look.stop)
        if not len(records):
            return
        self._know_sites()
        kinds = self._table["kind"][records["site"]]
        if look.strays:
            strays = np.isin(records["site"], look.strays) & (kinds == _PARAMETER)
            self._weigh_strays(records[strays])
            records, kinds = records[~strays], kinds[~strays]
        self._weigh(
            look, _Columns(records, kinds == _PARAMETER), _Columns(records, kinds == _GRADIENT)
        )
        if look.buffers:
            self._weigh_buffers(look, _Columns(records, kinds == _BUFFER))

    def _know_sites(self) -> None:
        table, total = self._table, len(self._sites)
        known = table.size
        if total == known:
            return
        table.grow(total)
        for number in range(known, total):
            site = self._sites[number]
            table["kind"][number] = _KINDS.get(site.role, _OTHER)
            if site.role == "param":
                self._parameter_of[site.module, site.label] = number
        for number in range(known, total):
            site = self._sites[number]
            if site.role == "param_grad":
                label = site.label[:-10] if site.label.endswith(".main_grad") else site.label
                parameter = self._parameter_of.get((site.module, label), number)
                table["parameter"][number] = parameter

    def _weigh(self, look: Look, parameters: _Columns, gradients: _Columns) -> None:
        table = self._table
        sites, sums = parameters["site"], parameters["checksum"]
        is_same = table["is_known"][sites] & (table["checksum"][sites] == sums)
        has_moved = ~is_same & table["is_known"][sites]
        table["checksum"][sites], table["is_known"][sites] = sums, True
        moved, idle = sites[has_moved], sites[is_same & table["is_pending"][sites]]
        # What has moved once, and moves no more, may have converged.
        table["has_moved"][moved] = True
        if len(moved):
            table["idle"][idle] += 1
        elif look.is_certain:
            table["idle_alone"][idle] += 1
        total = table["idle"] + table["idle_alone"]
        late = (table["idle"] >= UPDATES) | (total >= UPDATES_OF_NONE)
        self._say_of(np.flatnonzero(late & ~table["has_moved"]), _unmoved)

        of = table["parameter"][gradients["site"]]
        all_zero = gradients["zero_count"] >= gradients["numel"] * _COMPONENTS[gradients["dtype"]]
        is_nonzero, is_read = np.zeros((2, table.size), np.bool_)
        is_nonzero[of[~all_zero]] = True
        is_read[of] = True
        largest = np.maximum(np.abs(gradients["min"]), np.abs(gradients["max"]))
        noise = _ROUNDINGS * _SPACING[gradients["dtype"]] * np.max(largest, initial=0.0)
        is_felt = np.zeros(table.size, np.bool_)
        is_felt[of[~all_zero & (largest > noise)]] = True
        held = np.array(look.parameters, np.int64)
        table["is_pending"][sites] = False
        # An update with a bad gradient may be skipped: by a scaler, by the optimizer itself, or by
        # the guard. Nobody knows before it is over, and it is no loss to leave it out.
        if not len(held) or (gradients["flags"] & int(Flag.NONFINITE)).any():
            return
        is_live = np.array(look.is_live) & (table["kind"][held] == _PARAMETER)
        has_gradient = np.array(look.has_gradient)
        table["is_pending"][held] = is_live & is_felt[held]
        is_zero = is_read[held] & ~is_nonzero[held] & ~np.array(look.is_part)
        lacks = is_live & (~has_gradient | is_zero)
        table["no_gradient"][held[lacks]] += 1
        table["no_gradient"][held[is_live & ~lacks]] = 0
        if not look.is_certain:
            return
        late = table["no_gradient"][held] >= UPDATES
        self._say_of(held[late & has_gradient], _zero)
        self._say_of(held[late & ~has_gradient], _none)

    def _weigh_buffers(self, look: Look, records: _Columns) -> None:
        table = self._table
        if not len(records["site"]):
            return
        by_site = {site: place for place, site in enumerate(look.buffers)}
        places = [by_site[int(site)] for site in records["site"]]
        sites, sums = records["site"], records["checksum"]
        training = np.array(look.is_training)[places]
        calls = np.array(look.calls)[places]
        is_known = table["is_known"][sites]
        is_same = is_known & (table["checksum"][sites] == sums)
        has_run = calls > table["calls"][sites]
        is_sudden = (
            is_known
            & ~is_same
            & (table["constant"][sites] >= UPDATES)
            & (table["numel"][sites] == records["numel"])
            # Statistics may be on for training alone.
            & (table["was_training"][sites] == training)
            & ~np.array(look.is_exempt)[places]
        )
        table["constant"][sites[~is_same]] = 0
        # What did not run had no occasion to change.
        table["constant"][sites[is_same & has_run]] += 1
        for name, value in (
            ("checksum", sums),
            ("numel", records["numel"]),
            ("was_training", training),
            ("calls", calls),
            ("is_known", True),
        ):
            table[name][sites] = value
        self._say_of(sites[is_sudden], _sudden)

    def _weigh_strays(self, records: np.ndarray) -> None:
        before, now = self._stray_checksums, {}
        unmoved = []
        for record in records:
            site = int(record["site"])
            now[site] = int(record["checksum"])
            if before.get(site) == now[site]:
                unmoved.append(site)
        self._stray_checksums = now
        self._say_of(np.array(unmoved, np.int64), _stray)

    def _say_of(self, sites: np.ndarray, spell: Callable[[str], str]) -> None:
        said = self._table["is_said"]
        new = [int(site) for site in sites if not said[site]]
        if not new:
            return
        said[new] = True
        text = spell(_names([self._sites[site] for site in new]))
        with self._lock:
            self.notes.append(text)
            self._unsaid.append(text)


def _names(sites: Sequence[Site]) -> str:
    names = [f"{site.module}.{site.label}" if site.module else site.label for site in sites]
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more:,} more" if more > 0 else "")


def _unmoved(names: str) -> str:
    return (
        f"weights that don't move: {names} kept every bit for at least {UPDATES} updates although "
        "gradient and learning rate were not 0. Is the update smaller than the spacing of the "
        "dtype (bfloat16 weights want a float32 master copy), or written back by something else?"
    )


def _zero(names: str) -> str:
    return (
        f"gradients that are all 0: of {names}, in {UPDATES} updates in a row. A dead activation, "
        "a loss multiplied by 0, or float16 gradients that underflow do that"
    )


def _none(names: str) -> str:
    return (
        f"no gradient: {names} had grad=None in {UPDATES} updates in a row, though an optimizer "
        "holds it. Is the branch detached, under no_grad(), or never called? Set "
        "requires_grad=False where that is meant"
    )


def _stray(names: str) -> str:
    return (
        f"weights that don't move: {names} has a gradient, but no optimizer that has stepped holds "
        f"it, and it kept every bit for {UPDATES} updates. Give it to an optimizer, or set "
        "requires_grad=False where it is to be frozen"
    )


def _sudden(names: str) -> str:
    return (
        f"a buffer that had been constant has changed: {names}, after at least {UPDATES} updates "
        "without a change. Does an in-place operator write to it?"
    )
