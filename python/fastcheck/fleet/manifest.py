"""Manifests of what has been written to a fleet's folder, one for each node.

A file of records counts once its name is in a manifest, which is replaced as a whole: what a
collector that was killed has left behind counts for nothing, and is written again.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any, Optional

from fastcheck.errors import ConfigError, LogError
from fastcheck.utils.reading import parse_json

from .positions import Position, whole_number
from .schema import RECORD_FORMAT
from .store import Folder

_NODES = "_nodes"
# Matches a file of records; its name has the node if a collector wrote it.
_RECORD_FILE = re.compile(r"step=[0-9]+-[0-9]+/(?:node=([^./]+)(?:\.[0-9]+)?|[^/]+)\.parquet")


def plain_name(text: str) -> str:
    """``text`` with what a path can't hold replaced by ``_``."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", text) or "_"


@dataclass
class Manifest:
    """The manifest of what one node has written: its files with their rows, and how far each rank's
    log was read.

    ``batch`` numbers the writes; a file's name is never used twice.
    """

    node: str
    steps_per_file: int
    batch: int = 0
    rows: int = 0
    files: dict[str, int] = field(default_factory=dict)
    ranks: dict[int, Position] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Folder, run: str, node: str, steps_per_file: int) -> Manifest:
        """The node's manifest, or a new manifest.

        Raises:
            LogError: a newer fastcheck has written it, or it is damaged.
            ConfigError: its files have another number of steps.
        """
        path = cls._path(run, node)
        fields = _read_json(folder, path)
        if fields is None:
            return cls(node, steps_per_file)
        try:
            ranks = {int(rank): Position.from_dict(at) for rank, at in fields["ranks"].items()}
            files = {name: whole_number(rows) for name, rows in fields["files"].items()}
            each, batch, rows = (
                whole_number(fields[name]) for name in ("steps_per_file", "batch", "rows")
            )
            manifest = cls(node, each, batch, rows, files, ranks)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise _damaged(folder, path, repr(error)) from error
        if manifest.steps_per_file != steps_per_file:
            raise ConfigError(
                "the files of this run hold another number of steps",
                expected=f"--steps-per-file {manifest.steps_per_file}",
                got=str(steps_per_file),
                hint="give the same number, or another --run",
            )
        return manifest

    def write(self, folder: Folder, run: str) -> None:
        """Replaces the node's manifest: from here on its files count."""
        fields = {
            "format": RECORD_FORMAT,
            "steps_per_file": self.steps_per_file,
            "batch": self.batch,
            "rows": self.rows,
            "files": self.files,
            "ranks": {str(rank): at.to_dict() for rank, at in self.ranks.items()},
        }
        folder.write(self._path(run, self.node), json.dumps(fields).encode())

    @staticmethod
    def _path(run: str, node: str) -> str:
        return f"run={run}/{_NODES}/node={node}.json"


def runs_in(folder: Folder) -> list[str]:
    names = (path.partition("/")[0] for path in folder.files())
    return sorted({name[len("run=") :] for name in names if name.startswith("run=")})


def counted_files(folder: Folder, run: str) -> list[str]:
    """The paths of the files of records that count, below the run's folder.

    A file that no collector's manifest speaks for, as other programs write them, counts as it is.
    """
    start = f"run={run}/"
    present = [path[len(start) :] for path in folder.files(start[:-1])]
    written: set[str] = set()
    nodes = set()
    for path in present:
        if path.startswith(f"{_NODES}/node=") and path.endswith(".json"):
            written |= _files_of(folder, start + path)
            nodes.add(path[len(f"{_NODES}/node=") : -len(".json")])
    records = filter(None, map(_RECORD_FILE.fullmatch, present))
    return sorted(m.group() for m in records if m[0] in written or m[1] not in nodes)


def _files_of(folder: Folder, path: str) -> set[str]:
    """The files that a manifest names, which a collector may just have replaced.

    Raises:
        LogError: it is damaged.
    """
    fields = _read_json(folder, path)
    files: Any = {} if fields is None else fields.get("files")
    if not isinstance(files, dict):
        raise _damaged(folder, path, f"files is {str(files)[:60]}")
    return {str(file) for file in files}


def _damaged(folder: Folder, path: str, why: str) -> LogError:
    return LogError(
        "a file of the fleet is damaged",
        expected="a file that fastcheck collect has written",
        got=f"{folder.url(path)}: {why}",
        hint="delete it, and collect the node again",
    )


def _read_json(folder: Folder, path: str) -> Optional[dict[str, Any]]:
    data = folder.read(path)
    if data is None:
        return None
    try:
        fields = parse_json(data)
    except ValueError as error:
        raise _damaged(folder, path, str(error)) from error
    if not isinstance(fields, dict) or fields.get("format") != RECORD_FORMAT:
        raise LogError(
            "a fleet's manifest of another format",
            expected=f"format {RECORD_FORMAT}",
            got=f"{folder.url(path)}, {str(fields)[:60]}",
            hint="if a newer fastcheck wrote it, read it with that one",
        )
    return fields
