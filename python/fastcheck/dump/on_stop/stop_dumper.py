"""Dumps the operator that stopped a run: its tensors, random numbers, environment, and a script
that runs it again. The result is a dump like any other, of one call.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Callable, Optional

import torch

from fastcheck.calls.module_calls import ModuleNode
from fastcheck.dump.dump_writer import DumpSession, module_line
from fastcheck.dump.options import Options
from fastcheck.dump.storage.files import claim, place_of
from fastcheck.dump.storage.shards import Slot
from fastcheck.errors import ConfigError, LogError
from fastcheck.log.reader import read_log
from fastcheck.log.writer import found_at, working_directory
from fastcheck.record.format import NONFINITE_COUNTS
from fastcheck.record.site import Site, module_name
from fastcheck.report.stop_report import Dumped
from fastcheck.reproducibility.environment import environment_or_error
from fastcheck.utils.private import create_private
from fastcheck.utils.torch.operators import inputs_of, others_of
from fastcheck.utils.torch.own_operators import unobserved
from fastcheck.utils.torch.sharding import local
from fastcheck.utils.torch.training_state import Generators

from .captured_op import CapturedOp, OpCaptures
from .script import RANDOM, SCRIPT, TensorSpec, UnsupportedArgumentError, op_script

if TYPE_CHECKING:
    from fastcheck.record.event import Event


@dataclass(eq=False)
class StoppedCallDumper:
    """Writes the dumps of one monitor. ``captures``: the operators that may be a culprit; None
    where operators are not captured, for the reason ``_why_not``.
    """

    _directory: str
    _rank: int
    _nodes: Sequence[ModuleNode]
    captures: Optional[OpCaptures]
    _why_not: str = ""

    def __post_init__(self) -> None:
        self._start = working_directory()
        # A stop that was caught may be raised again, for the same reason.
        self._last: Optional[tuple[tuple[int, int], Dumped]] = None

    def dump(self, culprit: Event) -> Dumped:
        """Dumps the operator that is the culprit. Never raises."""
        if self.captures is None:
            return Dumped(None, notes=(f"nothing was dumped: {self._why_not}",))
        key = (culprit.step, int(culprit.record["seq"]))
        if self._last is None or self._last[0] != key:
            self._last = (key, self._dump(culprit, self.captures))
        return self._last[1]

    def _dump(self, culprit: Event, captures: OpCaptures) -> Dumped:
        site = culprit.site
        call = captures.find(int(culprit.record["seq"]))
        try:
            with unobserved():
                if call is not None:
                    return self._written(culprit, _Writer.write_op, call)
                stored = self._stored(site)
                if stored is not None:
                    return self._written(culprit, _Writer.write_stored, stored)
        except Exception as error:
            return _failed(error)
        finally:
            captures.clear()
        if site.op is None:
            why = "no operator has made it, it came in from outside"
        elif captures.lost_count:
            why = f"what {captures.lost_count} calls read was too much to be kept until now"
        else:
            why = "the call was not seen by the thread that called install()"
        return Dumped(None, notes=(f"nothing was dumped: {why}",))

    def _written(self, culprit: Event, method: Callable[..., Dumped], what: Any) -> Dumped:
        place = place_of(found_at(self._directory, self._start), culprit.step, self._rank)
        try:
            claim(place, culprit.step, overwrite=False)
        except ConfigError:
            why = f"a dump of step {culprit.step} is there already: {place}"
            return Dumped(None, notes=(f"nothing was dumped: {why}",))
        writer = _Writer(place, self._rank, culprit)
        try:
            return method(writer, what)
        finally:
            writer.close()

    def _stored(self, site: Site) -> Optional[torch.Tensor]:
        if site.role not in ("param", "buffer"):
            return None
        owner = next((node for node in self._nodes if node.path == site.module), None)
        tensor = None if owner is None else getattr(owner.module(), site.label, None)
        return local(tensor) if isinstance(tensor, torch.Tensor) else None


class _Writer:
    """A dump, in ``place``."""

    def __init__(self, place: str, rank: int, culprit: Event) -> None:
        self._culprit, self._site = culprit, culprit.site
        self._call = int(culprit.record["call"])
        self._place, self._rank = place, rank
        self._notes: list[str] = []
        meta: dict[str, Any] = {
            "dump": {"on_overflow": str(self._site), "call": self._call},
            "environment": environment_or_error(),
        }
        self._session = DumpSession(place, rank, meta, Options(culprit.step, tensors=True))

    def close(self) -> None:
        """Completes the files; after an error, the part that was written can be read."""
        self._session.finish("an error", {})

    def write_op(self, call: CapturedOp) -> Dumped:
        site, info = self._site, call.info
        backward = site.direction == "backward"
        taken, given = ("grad_output", "grad_input") if backward else ("input", "output")
        inputs = list(inputs_of(info, call.args, call.kwargs))
        read = [self._read(taken, label, place, tensor) for place, label, tensor in inputs]
        specs = [
            (label, tensor, spec) for (_, label, tensor), (_, spec) in zip(inputs, read) if spec
        ]
        made = [
            self._read(given, f"output[{at}]" if at else "output", at, tensor)[0]
            for at, tensor in enumerate(call.made)
        ]
        line: dict[str, Any] = {
            "kind": "op",
            "op": site.op or info.name,
            "call": self._call,
            "direction": site.direction,
            "module": site.module,
            "type": site.module_type,
            "ran": info.name,
            "in": [entry for entry, _ in read],
            "out": made,
        }
        others = others_of(info, call.args, call.kwargs)
        if others:
            line["args"] = others
        self._session.add_call(line)
        self._random(call.generators)
        what = f"{site.op or info.name} #{self._call} in {module_name(site)}"
        self._finish()
        written = [tensor for place, _, tensor in inputs if place in info.written]

        def text() -> str:
            ran = f" ({info.name})" if info.name != site.op else ""
            step = self._culprit.step
            title = f"What stopped the run at step {step}: {what}, {site.direction}{ran}."
            return op_script(
                title, call.func, call.args, call.kwargs, specs, written, self._counts(made)
            )

        is_whole = len(specs) == len(inputs)
        if not is_whole:
            self._notes.append("no script: not all that the operator read could be written")
        return self._dumped(what, text if is_whole else None)

    def write_stored(self, tensor: torch.Tensor) -> Dumped:
        """Dumps a weight that was non-finite before any operator ran."""
        site = self._site
        entry, _ = self._read(site.role, site.label, 0, tensor)
        line = module_line(site.module, site.module_type, "optimizer", self._call, "stored")
        self._session.add_call({**line, "in": [entry], "out": []})
        self._random(None)
        self._notes.append("no script: it is stored in the model, no operator has made it")
        self._finish()
        what = f"{site.tensor_name} of {module_name(site)}"
        return Dumped(self._place, what, None, tuple(self._notes))

    # Pieces

    def _read(
        self, role: str, label: str, index: int, tensor: torch.Tensor
    ) -> tuple[dict[str, Any], Optional[TensorSpec]]:
        site = self._site
        number = self._session.sites.intern(
            Site(site.module, site.module_type, site.direction, role, index, label, site.op)
        )
        entry = self._session.entry(label, tensor, number, self._call)
        value = entry.get("value")
        return entry, None if value is None else TensorSpec(tensor, Slot(*value))

    def _random(self, generators: Optional[Generators]) -> None:
        kept = generators or Generators()
        with create_private(os.path.join(self._place, RANDOM)) as file:
            torch.save(kept.to_dict(), file)

    def _finish(self) -> None:
        self._session.finish("OverflowDetected", {"culprit": str(self._site)})
        if self._session.problem:
            self._notes.append(f"the dump is not whole: {self._session.problem}")

    def _counts(self, entries: list[dict[str, Any]]) -> list[tuple[str, int, int, int]]:
        """(label, NaN, +Inf, -Inf) of the outputs, from their records."""
        records = {int(r["seq"]): r for r in read_log(self._place, self._rank).records}
        counts = []
        for entry in entries:
            record = records.get(entry.get("seq", -1))
            nan, pos, neg = (0 if record is None else int(record[n]) for n in NONFINITE_COUNTS)
            counts.append((str(entry["label"]), nan, pos, neg))
        return counts

    def _dumped(self, what: str, text: Any) -> Dumped:
        script = None
        if text is not None and not self._session.problem:
            try:
                with create_private(os.path.join(self._place, SCRIPT)) as file:
                    file.write(text().encode())
                script = SCRIPT
            except UnsupportedArgumentError as error:
                self._notes.append(f"no script: {error}")
        return Dumped(self._place, f"what {what} read and made", script, tuple(self._notes))


def _failed(error: Exception) -> Dumped:
    cause = error.__cause__ if isinstance(error, LogError) and error.__cause__ else error
    file = getattr(cause, "filename", None)
    lines = [line.strip() for line in str(error).splitlines()] or [type(error).__name__]
    reason = getattr(cause, "strerror", None) or "; ".join(lines)
    return Dumped(None, notes=(f"the dump failed: {f'{file}: ' if file else ''}{reason}",))
