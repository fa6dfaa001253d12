"""The directory of one step of one rank: its files, and how they are claimed and written.

In ``DIR/step3/rank0``:
    records-rank0-000000.bin, sites-rank0.jsonl, meta-rank0.json    a record log (..._log)
    calls.jsonl                     one line a call, in order: its tensors, and its other arguments
    tensors-00000.safetensors ...   the values, with tensors=True
    reference.jsonl                 one line an output that was compared with a reference
    index.json                      what is there; written last

Incomplete files end in ``.part``.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from fastcheck.errors import ConfigError
from fastcheck.utils.private import create_private, make_private_folders
from fastcheck.utils.text.numbers import to_json

INDEX = "index.json"
CALLS = "calls.jsonl"
REFERENCE = "reference.jsonl"

_OURS = re.compile(
    r"(?:index\.json|calls\.jsonl|reference\.jsonl|tensors-\d+\.safetensors"
    r"|meta-rank\d+\.json|(?:sites|events)-rank\d+\.jsonl|events-rank\d+\.bin"
    r"|records-rank\d+-\d+\.bin|random\.pt|replay\.py)(?:\.part|\.new)?"
)
_STEP = re.compile(r"step(\d+)")
_RANK = re.compile(r"rank(\d+)")


def place_of(directory: str, step: int, rank: int) -> str:
    """The directory of this step and rank."""
    return os.path.join(directory, f"step{step}", f"rank{rank}")


def claim(place: str, step: int, overwrite: bool) -> None:
    """Makes the directory, and deletes an earlier dump in it if ``overwrite``.

    ConfigError when a dump is there and may not be overwritten; OSError when it can't be made.
    Files that no dump has written are left alone.
    """
    make_private_folders(place)
    names = [name for name in os.listdir(place) if _OURS.fullmatch(name)]
    if names and not overwrite:
        raise ConfigError(
            f"a dump of step {step} is there already",
            expected="a step that was not dumped yet",
            got=place,
            hint="give step= the number of the training step, another directory, or overwrite=True",
        )
    # The index first: what is left of the others is then no complete dump.
    for name in sorted(names, key=lambda name: name != INDEX):
        os.unlink(os.path.join(place, name))


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
        yield from _rank_places(path, int(own.group(1)))
    for name in sorted(os.listdir(path)):
        step = _STEP.fullmatch(name)
        if step:
            yield from _rank_places(os.path.join(path, name), int(step.group(1)))


def _rank_places(path: str, step: int) -> Iterator[tuple[int, int, str]]:
    if not os.path.isdir(path):
        return
    for name in sorted(os.listdir(path)):
        rank = _RANK.fullmatch(name)
        place = os.path.join(path, name)
        if rank and os.path.isfile(os.path.join(place, CALLS)):
            yield step, int(rank.group(1)), place


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
        with create_private(part) as file:
            file.write(text)
        os.replace(part, path)
    except OSError as error:
        error.filename = path
        raise
