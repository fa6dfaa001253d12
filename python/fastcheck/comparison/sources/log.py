"""Reads a record log as a side of a comparison, in the memory of its largest step.

Only segments are read. The events file holds single records of steps whose others were evicted: to
compare these would find everything else missing.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from typing import Any, Callable, Optional

import numpy as np

from fastcheck.comparison.block import Block, Kind, Phase, Source
from fastcheck.comparison.names import Name, NameTable, Renaming, plain_label
from fastcheck.comparison.over_time import Schedules, schedules_of
from fastcheck.comparison.split import has_role
from fastcheck.errors import CompareError, printable
from fastcheck.log.reader import (
    find_logs,
    log_parts,
    read_schedule,
    read_sites_and_meta,
    read_watch,
)
from fastcheck.log.record_file import read_span, read_spans
from fastcheck.log.view import lost_site
from fastcheck.record.format import DTYPES
from fastcheck.record.site import Site, is_valid

_OPTIONS = ("level", "record", "every", "include", "exclude")
_STORED = ("param", "buffer", "optimizer_state")
_OF_MODULES = ("input", "output", "param")
_GRADIENTS = ("grad_input", "grad_output", "param_grad", "grad_norm", "found_inf", "loss_scale")


def is_log(path: str) -> bool:
    """True if a record log is at ``path`` or one level below it."""
    return os.path.isdir(path) and bool(find_logs(path))


class LogSource(Source):
    """Reads the newest log at or right below ``path``."""

    kind = Kind.LOG

    def __init__(self, path: str, side: str) -> None:
        self.title, self._side = find_logs(path)[-1], side
        self.notes: list[str] = []
        self._ranks: dict[int, _RankLog] = {}
        #: The coordinates of each rank that install() has found: ``{"tp": 1}``.
        self.coordinates: dict[int, dict[str, Any]] = {}
        environments, optimizers = {}, {}
        classes: dict[str, str] = {}
        self.classes = classes
        for rank, segments in log_parts(self.title).items():
            sites, meta = read_sites_and_meta(self.title, rank)
            if segments:
                self._ranks[rank] = _RankLog(rank, segments, sites)
            if "unreadable" in meta:
                self.notes.append(
                    f"{side}: {meta['unreadable']}. Environment, hyper-parameters, options and "
                    "attributes of modules are unknown"
                )
            environments[rank] = environment_of(meta, side, self.notes)
            placed = meta.get("placement")
            coordinates = placed.get("coordinates") if isinstance(placed, dict) else None
            self.coordinates[rank] = coordinates if isinstance(coordinates, dict) else {}
            optimizers[rank] = meta.get("optimizers")
            classes.update(
                (site.module, site.module_type)
                for site in sites.values()
                if site.role in _OF_MODULES
            )
            read = (site.module for site in sites.values() if site.role in ("input", "output"))
            self.called |= frozenset(read)
            modules = meta.get("modules")
            if isinstance(modules, dict):
                kept = {path: held for path, held in modules.items() if isinstance(held, dict)}
                self.modules = {**kept, **self.modules}
                self.options = self.options or {key: meta[key] for key in _OPTIONS if key in meta}
            states = meta.get("optimizer_states")
            if isinstance(states, list) and all(isinstance(one, dict) for one in states):
                self.optimizer_states = self.optimizer_states or states
            compiled = meta.get("compiled_modules")
            if isinstance(compiled, int):
                self.compiled_modules = max(self.compiled_modules, compiled)
        if not any(part.places for part in self._ranks.values()):
            raise CompareError(
                "this log holds no records",
                expected="a log that install(log_dir=...) or a stop has written",
                got=self.title,
            )
        damaged = sum(part.damaged for part in self._ranks.values())
        if damaged:
            self.notes.append(f"{side}: {damaged:,} damaged records of the log are left out")
        first = min(self._ranks)
        #: The settings that the first rank changed by plan.
        self.schedules: Schedules = schedules_of(
            read_schedule(self.title, first), optimizers.get(first)
        )
        #: Other warnings, as of a spike, may be of no more than what differs before.
        self.warned = [
            (line["step"], printable(line["text"]).partition(": ")[2])
            for line in read_watch(self.title)
            if line.get("is_warning") and line.get("kind") in ("invariant", "settings")
        ]
        evicted = {part.first_whole for part in self._ranks.values() if part.is_evicted}
        if evicted:
            self.notes.append(
                f"{side}: the log's limit has evicted the steps before {min(evicted):,}"
            )
        self.settings = settings_of(environments, optimizers)

    @property
    def parameters(self) -> set[str]:
        """The names of the parameters."""
        return {
            f"{site.module}.{site.label}" if site.module else site.label
            for part in self._ranks.values()
            for site in part.sites.values()
            if site.role == "param"
        }

    def places(self) -> list[tuple[int, int]]:
        return sorted((step, rank) for rank, part in self._ranks.items() for step in part.places)

    def block(
        self, step: int, rank: int, names: NameTable, renaming: Renaming, is_first: bool
    ) -> Block:
        part = self._ranks[rank]
        block = part.block(step, names, renaming, is_first)
        note = f"{self._side}: the log has lost names of tensors of rank {rank}: site N"
        if part.has_lost_names and note not in self.notes:
            self.notes.append(note)
        return block

    def is_cut(self, step: int, rank: int) -> bool:
        return step == max(self._ranks[rank].places)

    def is_updated(self, step: int, rank: int) -> bool:
        if not self.is_cut(step, rank):
            return True
        names = NameTable()
        block = self._ranks[rank].block(step, names, Renaming({}), False)
        return bool(has_role(block, "learning_rate", names).any())


def environment_of(meta: dict[str, Any], side: str, notes: list[str]) -> Any:
    """The environment in the description of a log or a dump; None, and a note, where this version
    does not know its format.
    """
    environment = meta.get("environment")
    if not isinstance(environment, dict) or environment.get("format", 1) == 1:
        return environment
    notes.append(
        f"{side}: its environment is of format {environment['format']!r:.20}, which this version "
        "of fastcheck does not know: it is not compared. The version that wrote it can read it"
    )
    return None


def settings_of(environments: dict[int, Any], optimizers: dict[int, Any]) -> dict[Phase, Any]:
    """The settings of a source, of what each rank has."""
    described = _by_rank(optimizers)
    return {
        Phase.ENVIRONMENT: _by_rank(environments),
        Phase.HYPERPARAMETERS: None if described is None else {"optimizers": described},
    }


def _by_rank(settings: dict[int, Any]) -> Any:
    """The value that all ranks have; by rank where they differ. None where no rank has a value."""
    known = {rank: value for rank, value in settings.items() if value is not None}
    if not known:
        return None
    values = list(known.values())
    if all(value == values[0] for value in values):
        return values[0]
    return {f"rank {rank}": value for rank, value in known.items()}


class _RankLog:
    """The segments of one rank, with the position of each step in them."""

    def __init__(self, rank: int, segments: list[str], sites: dict[int, Site]) -> None:
        self.rank = rank
        self.damaged = 0
        self.sites = sites
        self._segments = segments
        runs: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
        for number in range(len(segments)):
            self._index(number, runs)
        oldest = re.search(r"-(\d+)\.bin$", segments[0])
        self.is_evicted = oldest is not None and int(oldest.group(1)) > 0
        if self.is_evicted and len(runs) > 1:
            # The first step's beginning may have been in the segment that is gone.
            del runs[min(runs)]
        self.places = dict(runs)
        self.first_whole = min(runs, default=0)
        self._lookups: dict[int, SiteLookup] = {}

    @property
    def has_lost_names(self) -> bool:
        """True if records of sites were read whose names are not there."""
        return any(lookup.has_lost_names for lookup in self._lookups.values())

    def _index(self, number: int, runs: dict[int, list[tuple[int, int, int]]]) -> None:
        path = self._segments[number]
        pieces = [(np.zeros(0, np.int64), np.zeros(0, bool))]
        try:
            for records in read_spans(path):
                is_sound = is_valid(records)
                pieces.append((records["step"].copy(), is_sound))
                self.damaged += int((~is_sound & (records["version"] != 0)).sum())
        except OSError as error:
            raise unreadable_log(path, error) from error
        steps, valid = map(np.concatenate, zip(*pieces))
        starts = np.flatnonzero(np.diff(steps, prepend=steps[:1] - 1))
        ends = np.append(starts[1:], len(steps))
        for start, end in zip(starts.tolist(), ends.tolist()):
            if valid[start:end].any():
                runs[int(steps[start])].append((number, start, end))

    def block(self, step: int, names: NameTable, renaming: Renaming, is_first: bool) -> Block:
        try:
            chunks = [
                read_span(self._segments[number], start, end)
                for number, start, end in self.places[step]
            ]
        except OSError as error:
            raise unreadable_log(self._segments[0], error) from error
        records = chunks[0] if len(chunks) == 1 else np.concatenate(chunks)
        records = records[is_valid(records)]
        lookup = self._lookups.get(id(names))
        if lookup is None:
            lookup = self._lookups[id(names)] = SiteLookup(self.sites, names, renaming)
        numbers = records["site"]
        phases = lookup.phases_of(records, is_first)
        is_batch = (phases == Phase.ARRIVED) & (
            lookup["is_model"][numbers] | _IS_INTEGER[records["dtype"]]
        )
        phases = np.where(is_batch, np.uint8(Phase.BATCHES), phases)
        return Block(step, self.rank, lookup["name"][numbers], phases, records)


def unreadable_log(path: str, error: OSError) -> CompareError:
    return CompareError(
        "this log can't be read",
        expected="the files that fastcheck has written",
        got=f"{error.filename or path}: {error.strerror or error}",
    )


_IS_INTEGER = np.array([info.kind != "f8" for info in DTYPES])


def _is_early(records: np.ndarray) -> np.ndarray:
    """True where a record is the first of its site."""
    _, first = np.unique(records["site"], return_index=True)
    is_first = np.zeros(len(records), bool)
    is_first[first] = True
    return is_first


_COLUMNS = [("name", np.int64), ("phase", np.uint8)]
_COLUMNS += [(name, bool) for name in ("is_stored", "is_param", "is_model", "is_op")]


class SiteLookup:
    """A table with one row per site, whose columns the ``site`` column of a block indexes."""

    def __init__(
        self,
        sites: dict[int, Site],
        names: NameTable,
        renaming: Renaming,
        name_of: Optional[Callable[[Site, Renaming], Name]] = None,
    ) -> None:
        self._sites, self._names, self._renaming = sites, names, renaming
        self._name_of = name_of or _site_name
        self.has_lost_names = False
        self.table = self._rows(max(sites, default=0) + 1)

    def __getitem__(self, column: str) -> np.ndarray:
        return self.table[column]

    @staticmethod
    def _rows(count: int) -> np.ndarray:
        rows = np.zeros(count, _COLUMNS)
        rows["name"] = -1
        return rows

    def phases_of(self, records: np.ndarray, is_first: bool) -> np.ndarray:
        """The phase of each record. ``is_first``: parameters and buffers that are stored are
        initial weights.
        """
        numbers = records["site"]
        self.cover(np.unique(numbers))
        phases: np.ndarray = self["phase"][numbers]
        if is_first:
            stored = self["is_stored"][numbers] & (self["is_param"][numbers] | _is_early(records))
            phases = np.where(stored, np.uint8(Phase.WEIGHTS), phases)
        return phases

    def cover(self, numbers: np.ndarray) -> None:
        if not len(numbers):
            return
        missing = int(numbers[-1]) + 1 - len(self.table)
        if missing > 0:
            self.table = np.concatenate([self.table, self._rows(missing)])
        for number in numbers[self["name"][numbers] < 0].tolist():
            site = self._sites.get(number) or lost_site(number)
            self.has_lost_names |= number not in self._sites
            # The input of an op outside the modules is not the model's batch, at op level.
            is_model = site.module == "" and site.op is None
            name = self._names.number(self._name_of(site, self._renaming))
            is_stored, is_param = site.role in _STORED, site.role == "param"
            row = name, _phase(site), is_stored, is_param, is_model, site.op is not None
            self.table[number] = row


def _site_name(site: Site, renaming: Renaming) -> Name:
    label = plain_label(site.label, site.role)
    if site.role in ("param", "param_grad", "buffer"):
        # Renamed with its module: a map may be about the parameter itself.
        label, dot, inner = label.partition(".")  # weight.main_grad
        path = f"{site.module}.{label}" if site.module else label
        path, part = renaming.place(path)
        module, _, label = path.rpartition(".")
        return Name(module, site.direction, site.role, label + dot + inner, site.op or "", part)
    module, part = renaming.place(site.module) if site.module else ("", ())
    return Name(module, site.direction, site.role, label, site.op or "", part)


def _phase(site: Site) -> Phase:
    """The phase of a site, before the first step is told apart: parameters count as the outcome of
    an update.
    """
    is_root = site.module == "" or (
        site.module.startswith(site.module_type)
        and re.fullmatch(r"(_\d+)?", site.module[len(site.module_type) :])
    )
    # The result of a criterion, or what a model returns under that name.
    is_loss = site.module != "" or site.label in ("output.loss", "output['loss']")
    if site.role == "loss" or (site.role == "output" and is_root and is_loss):
        return Phase.LOSS
    is_op = site.role in ("input", "output") and site.direction != "forward"
    if site.role in _GRADIENTS or is_op:
        return Phase.GRADIENTS
    if site.role in ("param", "optimizer_state", "learning_rate", "skipped_update"):
        return Phase.UPDATE
    if site.role == "input" and is_root:
        return Phase.ARRIVED
    return Phase.FORWARD
