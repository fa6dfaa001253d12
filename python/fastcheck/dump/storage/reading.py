"""Reads a dump: its calls line by line, its values one by one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, Optional

import torch

from fastcheck.errors import CompareError, first_line
from fastcheck.utils.reading import check_regular, read_json, read_json_lines

from .files import CALLS, INDEX

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
