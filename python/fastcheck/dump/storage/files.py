"""The directory of one step of one rank: its files, and how they are claimed, written and read.

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
from typing import Any, Optional

import torch

from fastcheck.errors import CompareError, ConfigError, first_line
from fastcheck.utils.private import make_private_folders, write_private
from fastcheck.utils.reading import check_regular, read_json, read_json_lines
from fastcheck.utils.text.numbers import to_json

INDEX = "index.json"
CALLS = "calls.jsonl"
REFERENCE = "reference.jsonl"

_OURS = re.compile(
    r"(?:index\.json|calls\.jsonl|reference\.jsonl|tensors-\d+\.safetensors"
    r"|meta-rank\d+\.json|(?:sites|events)-rank\d+\.jsonl|events-rank\d+\.bin"
    r"|records-rank\d+-\d+\.bin|random\.pt|replay\.py)(?:(?:\.\d+)?\.part)?"
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
    try:
        write_private(path, text)
    except OSError as error:
        error.filename = path
        raise


_COMPLEX = {"complex64", "complex128"}


def read_index(place: str) -> dict[str, Any]:
    """index.json; empty where the dump was interrupted before it was written."""
    try:
        index = read_json(os.path.join(place, INDEX))
    except (OSError, ValueError):
        return {}
    return index if isinstance(index, dict) else {}


def read_calls(place: str) -> Iterator[dict[str, Any]]:
    """The lines of calls.jsonl, in order; a line that a crash has cut short is left out.

    Raises:
        OSError: it can't be read.
    """
    for line, _ in read_json_lines(os.path.join(place, CALLS)):
        if isinstance(line, dict):
            yield line


def open_safetensors(path: str, what: str) -> Any:
    """The file, opened by the library of that name, which maps it. ``what``: how an error calls it.

    Raises:
        CompareError: the package is missing.
        OSError, or an error of the library: it can't be read.
    """
    try:
        from safetensors import safe_open
    except ModuleNotFoundError as error:
        raise CompareError(
            f"{what} can't be read without the package safetensors",
            expected="it is installed",
            got=path,
            hint='pip install "fastcheck[tools]"',
        ) from error
    check_regular(path)
    return safe_open(path, framework="pt")


class StoredValues:
    """The tensors in the safetensors files of one dump, read by the library of that name."""

    def __init__(self, place: str) -> None:
        self._place = place
        self._files: dict[str, Any] = {}

    def has(self, file: str) -> bool:
        """True if the file is there: a file whose writing was interrupted is not."""
        return os.path.isfile(os.path.join(self._place, os.path.basename(file)))

    def load(self, file: str, key: str, dtype: str) -> torch.Tensor:
        """Row-major, on the host.

        Raises:
            CompareError: the package safetensors is missing, or the file is damaged or has no such
                tensor.
        """
        opened = self._files.get(file)
        if opened is None:
            opened = self._files[file] = self._open(file)
        try:
            tensor: torch.Tensor = opened.get_tensor(key)
            return torch.view_as_complex(tensor) if dtype in _COMPLEX else tensor
        except Exception as error:  # the library has errors of its own, torch RuntimeError
            path = os.path.join(self._place, os.path.basename(file))
            raise _unreadable(f"{path}: tensor {key!r}", error) from error

    def _open(self, file: str) -> Any:
        # Never another directory: the index may come from an untrusted source.
        path = os.path.join(self._place, os.path.basename(file))
        try:
            return open_safetensors(path, "the values of a dump")
        except CompareError:
            raise
        except Exception as error:  # SafetensorError, OSError, or what a binding of Rust raises
            raise _unreadable(path, error) from error


def _unreadable(what: str, error: Exception) -> CompareError:
    reason = getattr(error, "strerror", None) or first_line(error)
    return CompareError(
        "the values of a dump can't be read",
        expected="the safetensors files that Dumper has written",
        got=f"{what}: {reason[:300]}",
        hint="dump again; without these files, the statistics are compared",
    )


def value_of(entry: dict[str, Any]) -> Optional[tuple[str, str]]:
    """(file, key) of a tensor of the index; None where its value was not written."""
    value = entry.get("value")
    if isinstance(value, list) and len(value) == 2 and all(isinstance(v, str) for v in value):
        return value[0], value[1]
    return None
