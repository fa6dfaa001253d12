"""Detects weights that do not move and missing or zero gradients, by checksums before each update.

``monitor/weight_updates/updates.py`` notes what records lack, on the host; the rest is decided
where the records arrive, in NumPy. Once every weight has moved, an update is only checked for
gradients that are all 0 and were not before. docs/guide.md lists the cases without a warning.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Sequence
from typing import Callable

import numpy as np

from fastcheck.log.history import History
from fastcheck.record.format import DTYPES, Flag
from fastcheck.record.site import Site, SiteTable

from .updates import UPDATES, ParameterDetails, UpdateInfo, Watch


class ConstantBuffers:
    """Arrays with a place for each buffer of the last Look."""

    def __init__(self) -> None:
        self._last = UpdateInfo(Watch(), is_certain=False)
        self._sites = np.zeros(0, np.int64)
        # Where each buffer's record stands among those of an update.
        self._rows = np.zeros(0, np.int64)
        self._is_known = np.zeros(0, np.bool_)
        self._checksums = np.zeros(0, np.uint64)
        self._numel = np.zeros(0, np.int64)
        # For how many updates in which its module ran. The last ones, in which every module ran and
        # nothing changed, are counted apart.
        self._constant = np.zeros(0, np.int64)
        self._quiet_updates = 0

    def weigh(self, look: UpdateInfo, records: np.ndarray) -> np.ndarray:
        """The sites of those that this update finds changed. ``records``: of parameters and
        buffers.
        """
        last = self._last
        if (
            last.buffers is look.buffers
            and last.is_training == look.is_training
            and all(map(operator.lt, last.calls, look.calls))
            and self._rows.max() < len(records)
            and records["checksum"][self._rows].tobytes() == self._checksums.tobytes()
        ):
            self._quiet_updates += 1
            self._last = look
            return self._sites[:0]
        row_of = {site: row for row, site in enumerate(records["site"].tolist())}
        if not all(site in row_of for site in look.buffers):
            return self._sites[:0]
        calls, was_training = self._know(look.buffers)
        self._last = look
        self._rows = np.array([row_of[site] for site in look.buffers], np.int64)
        sums, numel = records["checksum"][self._rows], records["numel"][self._rows]
        # Statistics may be on for training alone.
        self._constant[np.array(look.is_training) != was_training] = 0
        is_same = (sums == self._checksums) & self._is_known
        is_sudden = ~is_same & (self._constant >= UPDATES) & (numel == self._numel)
        self._constant[~is_same] = 0
        # What did not run had no occasion to change.
        self._constant += is_same & (np.array(look.calls) > calls)
        self._checksums, self._numel = sums, numel
        self._is_known[:] = True
        sudden: np.ndarray = self._sites[is_sudden]
        return sudden

    def _know(self, buffers: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Makes a place for each of these; what is known of the old ones stays known. How often the
        module of each had been called by the last Look, and whether it was training.
        """
        self._constant += self._quiet_updates
        self._quiet_updates = 0
        last = self._last
        place_of = {site: place for place, site in enumerate(last.buffers)}
        old = np.array([place_of.get(site, -1) for site in buffers], np.int64)

        def moved(column: np.ndarray) -> np.ndarray:
            kept = np.zeros(len(buffers), column.dtype)
            kept[old >= 0] = column[old[old >= 0]]
            return kept

        self._sites = np.array(buffers, np.int64)
        self._is_known, self._constant = moved(self._is_known), moved(self._constant)
        self._checksums, self._numel = moved(self._checksums), moved(self._numel)
        return moved(np.array(last.calls, np.int64)), moved(np.array(last.is_training, np.bool_))


# Updates where nothing of what an optimizer holds has moved: perhaps it does nothing yet, on
# purpose.
_UPDATES_OF_NONE = 100

_NAMED = 5
_COMPONENTS = np.array([info.components for info in DTYPES], np.int64)
# A gradient smaller than this many roundings of the largest one of the update is what cancellation
# has left of a sum that is 0 in truth (of a bias before a normalisation, of the keys' bias in
# attention): it need not move anything.
_ROUNDINGS = 8
_EPSILON = {"float64": 2.0**-52, "float16": 2.0**-10, "bfloat16": 2.0**-7, "complex128": 2.0**-52}
_SPACING = np.array([_EPSILON.get(info.name, 2.0**-23) for info in DTYPES])


class _Table:
    """Arrays by site number, which grow with the number of sites."""

    _COLUMNS = (
        ("is_parameter", np.bool_),
        ("parameter", np.int32),
        ("is_known", np.bool_),
        ("checksum", np.uint64),
        ("is_pending", np.bool_),
        ("has_moved", np.bool_),
        ("idle", np.int32),
        ("idle_alone", np.int32),
        ("no_gradient", np.int32),
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


class StalledWeights:
    """``settle`` is called with the ledger's lock held, where an update's records are on the host;
    the rest by any thread.
    """

    def __init__(
        self,
        sites: SiteTable,
        history: History,
        report_internal_error: Callable[[str, Exception], None],
    ) -> None:
        self._sites = sites
        self._history = history
        self._trouble = report_internal_error
        self._table = _Table()
        self._parameter_of: dict[tuple[str, str], int] = {}
        self._stray_checksums: dict[int, int] = {}
        self._buffers = ConstantBuffers()
        self._lock = threading.Lock()
        self._unsaid: list[str] = []
        #: All warnings, for summary().
        self.notes: list[str] = []
        self.is_on = True

    def take_warnings(self) -> Sequence[str]:
        """The warnings that were not given yet, once."""
        if not self._unsaid:
            return ()
        with self._lock:
            texts, self._unsaid = self._unsaid, []
        return texts

    def settle(self, look: UpdateInfo) -> None:
        """The records of the look are here. Never raises."""
        if not self.is_on:
            return
        try:
            self._settle(look)
        except Exception as error:
            self.is_on = False
            self._trouble("whether weights move", error)

    def _settle(self, look: UpdateInfo) -> None:
        self._know_sites()
        records = self._history.between(look.first, look.stop)
        if len(records) < look.stop - look.first:  # of a step too large to be held
            look.watch.is_close = True
            return
        gradients_at, strays_at = look.first_gradient - look.first, look.first_stray - look.first
        stored, gradients = records[:gradients_at], records[gradients_at:strays_at]
        if look.early_gradients:
            early = self._early_records(look.early_gradients)
            if len(early) < len(look.early_gradients):
                look.watch.is_close = True
                return
            gradients = np.concatenate([early, gradients])
        if look.close is None:
            self._is_unchanged(look.watch, gradients)
        else:
            self._weigh_parameters(look, stored)
            look.watch.is_close = self._weigh_gradients(look, look.close, gradients)
        if look.buffers:
            self._warn_about(self._buffers.weigh(look, stored), _sudden)
        if strays_at < len(records):
            self._weigh_strays(records[strays_at:])

    def _early_records(self, numbers: Sequence[int]) -> np.ndarray:
        records = self._history.between(min(numbers), max(numbers) + 1)
        of = dict(zip(records["seq"].tolist(), range(len(records))))
        return records[[of[number] for number in numbers if number in of]]

    def _is_unchanged(self, watch: Watch, gradients: np.ndarray) -> None:
        """Most updates are like the last that was looked at closely. Is this one?"""
        counts = gradients["zero_count"]
        if len(counts) != len(watch.all_zero) or (counts >= watch.all_zero).tobytes() != watch.zero:
            watch.is_close = True

    def _know_sites(self) -> None:
        table, total = self._table, len(self._sites)
        known = table.size
        if total == known:
            return
        table.grow(total)
        for number in range(known, total):
            site = self._sites[number]
            if site.role == "param":
                table["is_parameter"][number] = True
                self._parameter_of[site.module, site.label] = number
        for number in range(known, total):
            site = self._sites[number]
            if site.role == "param_grad":
                label = site.label[:-10] if site.label.endswith(".main_grad") else site.label
                parameter = self._parameter_of.get((site.module, label), number)
                table["parameter"][number] = parameter

    def _weigh_parameters(self, look: UpdateInfo, records: np.ndarray) -> None:
        """Which have moved since the last close look."""
        table = self._table
        chosen = np.flatnonzero(table["is_parameter"][records["site"]])
        sites, sums = records["site"][chosen], records["checksum"][chosen]
        is_same = table["is_known"][sites] & (table["checksum"][sites] == sums)
        has_moved = ~is_same & table["is_known"][sites]
        table["checksum"][sites], table["is_known"][sites] = sums, True
        moved, idle = sites[has_moved], sites[is_same & table["is_pending"][sites]]
        table["is_pending"][sites] = False
        # What has moved once, and moves no more, may have converged.
        table["has_moved"][moved] = True
        if len(moved):
            table["idle"][idle] += 1
        elif look.is_certain:
            table["idle_alone"][idle] += 1
        if len(idle):
            total = table["idle"] + table["idle_alone"]
            late = (table["idle"] >= UPDATES) | (total >= _UPDATES_OF_NONE)
            self._warn_about(np.flatnonzero(late & ~table["has_moved"]), _unmoved)

    def _weigh_gradients(
        self, look: UpdateInfo, close: ParameterDetails, gradients: np.ndarray
    ) -> bool:
        """Which parameters are due to move, and which lack a gradient. Whether the next update has
        to be looked at as closely.
        """
        table = self._table
        held = np.array(close.parameters, np.int64)
        # An update with a bad gradient may be skipped: by a scaler, by the optimizer itself, or by
        # the guard. Whether it will is not known before it is over; it is left out.
        if not len(held) or (gradients["flags"] & int(Flag.NONFINITE)).any():
            return True
        of, dtypes = table["parameter"][gradients["site"]], gradients["dtype"]
        look.watch.all_zero = gradients["numel"] * _COMPONENTS[dtypes]
        all_zero = gradients["zero_count"] >= look.watch.all_zero
        look.watch.zero = all_zero.tobytes()
        is_nonzero, is_read, is_felt = np.zeros((3, table.size), np.bool_)
        is_nonzero[of[~all_zero]] = True
        is_read[of] = True
        largest = np.maximum(np.abs(gradients["min"]), np.abs(gradients["max"]))
        noise = _ROUNDINGS * _SPACING[dtypes] * np.max(largest, initial=0.0)
        is_felt[of[~all_zero & (largest > noise)]] = True
        is_live = np.array(close.is_live) & table["is_parameter"][held]
        has_gradient = np.array(close.has_gradient)
        is_pending = table["is_pending"][held] = is_live & is_felt[held]
        is_zero = is_read[held] & ~is_nonzero[held] & ~np.array(close.is_part)
        lacks = is_live & (~has_gradient | is_zero)
        table["no_gradient"][held[lacks]] += 1
        table["no_gradient"][held[is_live & ~lacks]] = 0
        updates = table["no_gradient"][held]
        if look.is_certain:
            self._warn_about(held[(updates >= UPDATES) & has_gradient], _zero)
            self._warn_about(held[(updates >= UPDATES) & ~has_gradient], _none)
        is_open = (is_pending & ~table["has_moved"][held]) | ((updates > 0) & (updates < UPDATES))
        return bool((is_open & ~table["is_said"][held]).any())

    def _weigh_strays(self, records: np.ndarray) -> None:
        before, now = self._stray_checksums, {}
        unmoved = []
        for record in records:
            site = int(record["site"])
            now[site] = int(record["checksum"])
            if before.get(site) == now[site]:
                unmoved.append(site)
        self._stray_checksums = now
        self._warn_about(np.array(unmoved, np.int64), _stray)

    def _warn_about(self, sites: np.ndarray, spell: Callable[[str], str]) -> None:
        if not len(sites):
            return
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
    names = [site.key for site in sites]
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
