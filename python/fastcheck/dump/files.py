"""The directory of one step of one rank: what lies in it, and how it is claimed and written.

In ``DIR/step3/rank0``:
    records-rank0-000000.bin, sites-rank0.jsonl, meta-rank0.json    a record log (..._log)
    calls.jsonl                     one line a call, in order: its tensors, and its other arguments
    tensors-00000.safetensors ...   the values, where they were asked for
    reference.jsonl                 one line an output that was held against a reference
    index.json                      what is there; written last

What is not whole has the ending ``.part`` until it is.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from .._errors import ConfigError, explain
from .._numbers import to_json

__all__ = [
    "CALLS",
    "INDEX",
    "REFERENCE",
    "Lines",
    "claim",
    "is_dump_directory",
    "json_text",
    "place_of",
    "places_in",
    "write_all",
    "write_json",
]

INDEX = "index.json"
CALLS = "calls.jsonl"
REFERENCE = "reference.jsonl"

_OURS = re.compile(
    r"(?:index\.json|calls\.jsonl|reference\.jsonl|tensors-\d+\.safetensors"
    r"|meta-rank\d+\.json|(?:sites|events)-rank\d+\.jsonl|events-rank\d+\.bin"
    r"|records-rank\d+-\d+\.bin|random\.pt|replay\.py|call\.pickle)(?:\.part|\.new)?"
)
_STEP = re.compile(r"step(\d+)")
_RANK = re.compile(r"rank(\d+)")


def place_of(directory: str, step: int, rank: int) -> str:
    """Where this step of this rank goes."""
    return os.path.join(directory, f"step{step}", f"rank{rank}")


def claim(place: str, step: int, overwrite: bool) -> None:
    """Makes the directory, and empties it of an earlier dump when ``overwrite`` says so.

    ConfigError when one is there and may not be overwritten; OSError when it can't be made. Files
    that no dump has written are left alone.
    """
    os.makedirs(place, exist_ok=True)
    found = [name for name in os.listdir(place) if _OURS.fullmatch(name)]
    if found and not overwrite:
        raise ConfigError(
            explain(
                f"a dump of step {step} is there already",
                expected="a step that was not dumped yet",
                came=place,
                do="give step= the number of the training step, another directory, or "
                "overwrite=True",
            )
        )
    # The index first: what is left of the others is then no complete dump.
    for name in sorted(found, key=lambda name: name != INDEX):
        os.unlink(os.path.join(place, name))


def is_dump_directory(path: str) -> bool:
    """Whether a dump, a step of one or a rank of a step is at ``path``."""
    return any(True for _ in places_in(path))


def places_in(path: str) -> Iterator[tuple[int, int, str]]:
    """(step, rank, directory) of all that was dumped at ``path``: a dump, a step or a rank."""
    path = os.path.abspath(path)
    if os.path.isfile(os.path.join(path, CALLS)):
        rank = _RANK.fullmatch(os.path.basename(path))
        step = _STEP.fullmatch(os.path.basename(os.path.dirname(path)))
        # A rank that was moved elsewhere has lost its numbers.
        yield int(step.group(1)) if step else 0, int(rank.group(1)) if rank else 0, path
        return
    if not os.path.isdir(path):
        return
    own = _STEP.fullmatch(os.path.basename(path))
    if own:
        yield from _ranks(path, int(own.group(1)))
    for name in sorted(os.listdir(path)):
        step = _STEP.fullmatch(name)
        if step:
            yield from _ranks(os.path.join(path, name), int(step.group(1)))


def _ranks(path: str, step: int) -> Iterator[tuple[int, int, str]]:
    if not os.path.isdir(path):
        return
    for name in sorted(os.listdir(path)):
        rank = _RANK.fullmatch(name)
        place = os.path.join(path, name)
        if rank and os.path.isfile(os.path.join(place, CALLS)):
            yield step, int(rank.group(1)), place


class Lines:
    """A file of JSON lines. Every write is one of whole lines: one that the disk cut short is cut
    off again, so that what a reader finds is whole.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0)
        self._descriptor = os.open(path, flags, 0o666)

    def write(self, lines: list[str]) -> None:
        """OSError names the file."""
        text = "".join(line + "\n" for line in lines)
        before = os.fstat(self._descriptor).st_size
        try:
            write_all(self._descriptor, text.encode())
        except OSError as error:
            error.filename = self.path
            os.ftruncate(self._descriptor, before)
            raise

    def close(self) -> None:
        """Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def json_text(value: object) -> str:
    """Strict JSON in one line."""
    try:
        return json.dumps(value, allow_nan=False)
    except ValueError:  # a NaN or an infinity, which is rare: looked for only then
        return json.dumps(to_json(value), allow_nan=False)


def write_json(path: str, value: Mapping[str, Any]) -> None:
    """Strict JSON, there as a whole or not at all."""
    text = json.dumps(to_json(value), allow_nan=False, indent=1).encode() + b"\n"
    part = f"{path}.part"
    try:
        with open(part, "wb") as file:
            file.write(text)
        os.replace(part, path)
    except OSError as error:
        error.filename = path
        raise


def write_all(descriptor: int, data: Any) -> None:
    """All of it: an almost full disk takes less, and then the next call raises."""
    view = memoryview(data).cast("B")
    while view:
        view = view[os.write(descriptor, view) :]
