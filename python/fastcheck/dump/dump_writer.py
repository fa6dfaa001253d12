"""DumpSession: writes one dump, call by call, and switches itself off when writing fails."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any, Callable

import torch

from fastcheck.calls.recorder import make_lock
from fastcheck.calls.tracker import Running
from fastcheck.dump.storage.files import CALLS, INDEX, REFERENCE, json_text, write_json
from fastcheck.dump.storage.record_writer import RecordWriter
from fastcheck.dump.storage.shards import ShardWriter
from fastcheck.errors import warn_of_fault
from fastcheck.log.writer import RecordLog
from fastcheck.record.site import SiteTable
from fastcheck.utils.private import AppendFile
from fastcheck.utils.torch.operators import describe_tensor

from .options import Options

_LINES_AT_ONCE = 512
_LEFT_OUT_NAMES = 10_000


def module_line(
    module: str, type_name: str, direction: str, call: int, kind: str = "module"
) -> dict[str, Any]:
    """A line of the index on a module, without its tensors."""
    line: dict[str, Any] = {"kind": kind, "module": module, "type": type_name}
    return {**line, "direction": direction, "call": call, "in": [], "out": []}


class DumpSession:
    """Writes to the directory ``place``. Every method but finish() expects ``lock`` to be held."""

    def __init__(self, place: str, rank: int, meta: Mapping[str, Any], options: Options) -> None:
        self.lock = make_lock()
        self.place = place
        self.step = options.step
        self.rank = rank
        self.sites = SiteTable()
        self.is_closed = False
        #: The reason why it was switched off, in one sentence; empty while it works.
        self.problem = ""
        self.call_count = 0
        #: The number of records whose memory was not read again.
        self.reused_count = 0
        self.left_out: dict[tuple[str, str], int] = {}
        self.differences: list[dict[str, Any]] = []
        self.compared_count = 0
        self._started = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        self._lines: list[str] = []
        self._reference_lines: list[str] = []
        self._index = AppendFile(os.path.join(place, CALLS))
        has_reference = options.has_reference
        self._reference = AppendFile(os.path.join(place, REFERENCE)) if has_reference else None
        self._log = RecordLog(place, rank, None, self.sites, meta, on_failure=self._log_failed)
        self._writer = ShardWriter(place, options.memory_bytes) if options.tensors else None
        self.records = RecordWriter(
            self._log, options.step, options.depth, options.is_logical, self._writer
        )

    @property
    def is_on(self) -> bool:
        return not self.is_closed and not self.problem

    def entry(
        self, label: str, tensor: torch.Tensor, site: int, call: int, flags: int = 0
    ) -> dict[str, Any]:
        """Reads a tensor; returns its entry in the index."""
        fields = self.records.read(tensor, site, call, flags)
        return {"label": label, **describe_tensor(tensor), **fields}

    def entries(
        self, running: Running, role: str, tensors: list[tuple[str, torch.Tensor]], flags: int = 0
    ) -> list[dict[str, Any]]:
        """Reads what a call of a module takes or makes, by label; returns the entries."""
        node, call = running.node, running.call
        return [
            self.entry(label, tensor, node.site(role, label, position), call, flags)
            for position, (label, tensor) in enumerate(tensors)
        ]

    def add_call(self, line: Mapping[str, Any]) -> int:
        """A line of the index; its number, which it begins with."""
        number = self.call_count
        self.add_line(json_text({"n": number, **line}))
        return number

    def add_line(self, text: str) -> None:
        """A line of the index, numbered ``call_count``."""
        self.call_count += 1
        self._lines.append(text)
        if len(self._lines) >= _LINES_AT_ONCE:
            self.write()

    def add_reference(self, line: Mapping[str, Any]) -> None:
        self._reference_lines.append(json_text(line))
        self.compared_count += 1

    def leave_out(self, name: str, reason: str) -> None:
        """Counts a call that was not dumped, or not compared with the reference, and why."""
        key = (name, reason)
        if key in self.left_out or len(self.left_out) < _LEFT_OUT_NAMES:
            self.left_out[key] = self.left_out.get(key, 0) + 1

    def add_meta(self, **fields: Any) -> None:
        self._log.add_meta(**fields)

    def write(self) -> None:
        """Writes everything recorded so far to disk. Never raises."""
        try:
            self.records.flush()
            for file, lines in (
                (self._index, self._lines),
                (self._reference, self._reference_lines),
            ):
                if file is not None and lines:
                    file.append("".join(f"{line}\n" for line in lines).encode())
                lines.clear()
        except OSError as error:
            self.fail(error)
        if self._writer is not None and self._writer.problem is not None:
            self.fail(self._writer.problem)

    def finish(self, ended_by: str, more: Mapping[str, Any]) -> None:
        """Writes the rest, and the index last. Never raises; idempotent."""
        with self.lock:
            if self.is_closed:
                return
            self.is_closed = True
            if not self.problem:
                self.guarded("the end of the dump", self.write)
        if self._writer is not None:
            # Without the lock: close() waits for the disk.
            self._writer.close()
        with self.lock:
            if self._writer is not None and self._writer.problem is not None:
                self.fail(self._writer.problem)
            for file in (self._index, self._reference):
                if file is not None:
                    file.close()
            self._log.close()
            try:
                write_json(os.path.join(self.place, INDEX), self._summary(ended_by, more))
            except OSError as error:
                self.fail(error)

    def _summary(self, ended_by: str, more: Mapping[str, Any]) -> dict[str, Any]:
        made: dict[str, Any] = {
            "fastcheck": "dump",
            "format": 1,
            "step": self.step,
            "rank": self.rank,
            "started": self._started,
            "is_complete": not self.problem,
            "problem": self.problem or None,
            "ended_by": ended_by or None,
            "calls": self.call_count,
            "records": self.records.count,
            "reused": self.reused_count,
            "left_out": [
                {"name": name, "reason": reason, "times": times}
                for (name, reason), times in self.left_out.items()
            ],
            **more,
        }
        if self._writer is not None:
            made["tensors"] = {
                "files": self._writer.files,
                "bytes": self._writer.bytes_written,
                "shared": self.records.shared_count,
            }
        if self._reference is not None:
            made["reference"] = {"outputs": self.compared_count, "different": self.differences}
        return made

    # Failures

    def guarded(self, what: str, method: Callable[..., Any], *args: Any) -> Any:
        """Calls the method; an error in it ends the dump, but not the training."""
        try:
            return method(*args)
        except Exception as error:
            self.failed(what, error)
            return None

    def failed(self, what: str, error: Exception) -> None:
        """Ends the dump: fastcheck itself failed."""
        self.switch_off(f"{what}: {type(error).__name__}: {error}")

    def fail(self, error: OSError) -> None:
        """Ends the dump: a write failed."""
        reason = error.strerror or str(error)
        self.switch_off(f"{error.filename or self.place}: {reason}")

    def _log_failed(self, error: Exception, path: str) -> None:
        self.switch_off(f"{path}: {getattr(error, 'strerror', None) or error}")

    def switch_off(self, problem: str) -> None:
        """Ends the dump, with one warning."""
        if self.problem:
            return
        self.problem = problem
        self._lines.clear()
        warn_of_end(self.step, problem)


def warn_of_end(step: int, problem: str) -> None:
    """Warns that a dump has ended early, or could not begin."""
    warn_of_fault(
        f"fastcheck: the dump of step {step} stopped: {problem}. Training goes on; what was "
        "complete until then can be read."
    )
