"""Reads a dump as a side of a comparison, step by step, with the values where they were written."""

from __future__ import annotations

import os
from collections.abc import Container, Iterable
from functools import partial
from typing import Any, Optional

import numpy as np
import torch

from fastcheck.comparison.block import Block, Extra, Kind, Phase, Source, leading_bytes
from fastcheck.comparison.names import Name, NameTable, Renaming, plain_label
from fastcheck.dump.api_calls import PARAMETER
from fastcheck.dump.options import LEVELS
from fastcheck.dump.storage.files import StoredValues, places_in, read_calls, read_index, value_of
from fastcheck.errors import CompareError
from fastcheck.log.history import joined
from fastcheck.log.reader import log_parts, read_meta, read_sites_and_meta
from fastcheck.log.record_file import read_pieces
from fastcheck.record.format import VALUE_BYTES
from fastcheck.record.site import Site
from fastcheck.utils.names.msprobe import plain_api
from fastcheck.utils.reading import without_collector

from .log import SiteLookup, environment_of, settings_of

#: The options of Dumper that choose what is dumped.
_LISTS = ("ops", "modules", "first", "last", "from_log")


def is_dump(path: str) -> bool:
    """True if Dumper has written what is at ``path``: a dump, a step of it or a rank of a step."""
    return os.path.isdir(path) and any(True for _ in places_in(path))


class DumpSource(Source):
    kind = Kind.DUMP

    def __init__(self, path: str, side: str) -> None:
        self.title = path
        self.notes: list[str] = []
        #: The levels of its steps, as Dumper has them.
        self.levels: set[str] = set()
        #: The functions whose calls are compared with msprobe's calls of the API, and those
        #: functions with the inputs that are parameters.
        self.functions: Optional[frozenset[str]] = None
        self.parameters: frozenset[tuple[str, str]] = frozenset()
        self._places: dict[tuple[int, int], str] = {}
        self._indices: dict[tuple[int, int], dict[str, Any]] = {}
        environments: dict[int, Any] = {}
        optimizers: dict[int, Any] = {}
        for step, rank, place in sorted(places_in(path)):
            self._places[step, rank] = place
            index = self._indices[step, rank] = read_index(place)
            if not index.get("is_complete"):
                why = index.get("problem") or "it was interrupted"
                self.notes.append(f"{side}: the dump of step {step} has no end: {why}")
            options = index.get("options")
            if isinstance(options, dict):
                self.is_partial |= any(options.get(name) for name in _LISTS)
                self.levels.update(level for level in LEVELS if options.get("level") == level)
            meta = read_meta(os.path.join(place, f"meta-rank{rank}.json"))
            environments.setdefault(rank, environment_of(meta, side, self.notes))
            # The optimizers of the first step in which an optimizer stepped.
            if meta.get("optimizers") is not None:
                optimizers.setdefault(rank, meta["optimizers"])
        self.settings = settings_of(environments, optimizers)

    def places(self) -> list[tuple[int, int]]:
        return sorted(self._places)

    def is_cut(self, step: int, rank: int) -> bool:
        return not self._indices[step, rank].get("is_complete", False)

    def api_sites(self) -> list[Site]:
        """The sites of calls of the API, of all steps and ranks."""
        sites = (
            read_sites_and_meta(place, _owner(place, rank))[0].values()
            for (_, rank), place in self._places.items()
        )
        return [site for some in sites for site in some if site.op]

    @without_collector()
    def block(
        self, step: int, rank: int, names: NameTable, renaming: Renaming, is_first: bool
    ) -> Block:
        place = self._places[step, rank]
        owner = _owner(place, rank)
        segments = log_parts(place).get(owner, [])
        pieces = [piece for path in segments for piece in read_pieces(path)]
        records = joined([piece.records for piece in pieces])
        damaged = sum(piece.damaged for piece in pieces)
        if damaged:
            self.notes.append(f"{place}: {damaged:,} damaged records are left out")
        sites, _ = read_sites_and_meta(place, owner)
        of_calls = None
        if self.functions is not None:
            of_calls = partial(_msprobe_name, parameters=self.parameters)
            kept = {
                number
                for number, site in sites.items()
                if plain_api(site.op or "") in self.functions and site.role != "grad_input"
            }
            records = records[np.isin(records["site"], list(kept))]
        lookup = SiteLookup(sites, names, renaming, of_calls)
        phases = lookup.phases_of(records, is_first)
        numbers = records["site"]
        if of_calls is not None:
            updates = [number for number, site in sites.items() if site.direction == "optimizer"]
            phases = np.where(np.isin(numbers, updates), np.uint8(Phase.UPDATE), phases)
            read = [number for number, site in sites.items() if _is_among(site, self.parameters)]
            stored = np.uint8(Phase.WEIGHTS if is_first else Phase.UPDATE)
            phases = np.where(np.isin(numbers, read), stored, phases)
        is_root_input = (phases == Phase.ARRIVED) & lookup["is_model"][numbers]
        phases = np.where(is_root_input, np.uint8(Phase.BATCHES), phases)
        is_computed = (phases == Phase.ARRIVED) & lookup["is_op"][numbers]
        if not self.is_partial:
            # A dump of chosen operators does not show which tensors were given to the step.
            is_computed &= _is_known(records, phases)
        phases = np.where(is_computed, np.uint8(Phase.FORWARD), phases)
        return Block(
            step, rank, lookup["name"][numbers], phases, records, self._extras(place, records)
        )

    def _extras(self, place: str, records: np.ndarray) -> list[Extra]:
        values = StoredValues(place)
        extras: dict[int, Extra] = {}
        try:
            for line in read_calls(place):
                for part in ("in", "out"):
                    for entry in line.get(part, ()):
                        if "seq" in entry:
                            extras[int(entry["seq"])] = _extra(entry, values, line, part)
        except (AttributeError, KeyError, OSError, OverflowError, TypeError, ValueError) as error:
            raise CompareError(
                "the index of this dump can't be read",
                expected="the calls.jsonl that Dumper has written",
                got=f"{place}: {error}",
            ) from error
        nothing = Extra()
        return [extras.get(seq, nothing) for seq in records["seq"].tolist()]


def _owner(place: str, rank: int) -> int:
    """The rank whose files lie there: those of a rank's directory that was moved elsewhere still
    have its number.
    """
    parts = log_parts(place)
    return rank if rank in parts else next(iter(parts), rank)


def named_input(index: int) -> str:
    """The label of an input of a call of the API that is compared with msprobe's: by its place
    among the tensors, as one side may give by keyword what the other does not.
    """
    return f"input[{index}]"


def parameters_among(sites: Iterable[Site]) -> frozenset[tuple[str, str]]:
    """Functions of the API and their inputs that are parameters in each call but those of an
    optimizer.
    """
    inputs: dict[tuple[str, str], bool] = {}
    for site in sites:
        if site.role == "input" and site.direction == "forward":
            key = plain_api(site.op or ""), named_input(site.index)
            inputs[key] = inputs.get(key, True) and site.label.endswith(PARAMETER)
    return frozenset(key for key, is_parameter in inputs.items() if is_parameter)


def _is_among(site: Site, parameters: Container[object]) -> bool:
    is_read = site.role == "input" and site.direction == "forward"
    return is_read and (plain_api(site.op or ""), named_input(site.index)) in parameters


def _msprobe_name(site: Site, renaming: Renaming, parameters: Container[object]) -> Name:
    """The name of a tensor of a call of the API as MsprobeSource has it, without the module."""
    direction = "backward" if site.role == "grad_output" else "forward"
    role = "param" if _is_among(site, parameters) else site.role
    is_input = site.role == "input"
    label = named_input(site.index) if is_input else plain_label(site.label, site.role)
    return Name("", direction, role, label, renaming(plain_api(site.op or "")))


def _extra(entry: dict[str, Any], values: StoredValues, line: dict[str, Any], part: str) -> Extra:
    slot = value_of(entry)
    load = None
    if slot is not None and values.has(slot[0]):
        file, key = slot
        dtype = str(entry["dtype"])

        def load() -> torch.Tensor:
            return values.load(file, key, dtype)

    wants: Optional[bool] = bool(entry.get("requires_grad", False))
    if line.get("kind") == "op" and part == "out":
        wants = None  # the dispatcher hands tensors on before autograd has marked them
    return Extra(tuple(map(int, entry["shape"])), wants, None, load)


def _is_known(records: np.ndarray, phases: np.ndarray) -> np.ndarray:
    """True where what an op reads was computed earlier in this step, or is stored by a module,
    found by its contents: if not, it was given to the step, as labels are.
    """
    _, contents = np.unique(leading_bytes(records, VALUE_BYTES), return_inverse=True)
    contents = contents.reshape(-1)
    first = np.full(int(contents.max(initial=-1)) + 1, len(records), np.int64)
    places = np.arange(len(records))
    others = phases != Phase.ARRIVED
    np.minimum.at(first, contents[others], places[others])
    return first[contents] < places
