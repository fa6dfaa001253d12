"""Reads a dump again: its calls line by line, its values one by one."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any, Optional

import torch

from .._errors import CompareError, explain
from .files import CALLS, INDEX

__all__ = ["Values", "read_calls", "read_index", "value_of"]

_COMPLEX = {"complex64", "complex128"}


def read_index(place: str) -> dict[str, Any]:
    """index.json; empty where the dump was interrupted before it was written."""
    try:
        with open(os.path.join(place, INDEX), encoding="utf-8") as file:
            found = json.load(file)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def read_calls(place: str) -> Iterator[dict[str, Any]]:
    """The lines of calls.jsonl, in order; one that a crash has cut short is left out."""
    with open(os.path.join(place, CALLS), "rb") as file:
        for raw in file:
            try:
                line = json.loads(raw)
            except ValueError:
                continue
            if isinstance(line, dict):
                yield line


class Values:
    """The tensors in the safetensors files of one dump, read by the library of that name."""

    def __init__(self, place: str) -> None:
        self._place = place
        self._files: dict[str, Any] = {}

    def has(self, file: str) -> bool:
        """Whether the file is there: one that was interrupted is not."""
        return os.path.isfile(os.path.join(self._place, os.path.basename(file)))

    def load(self, file: str, key: str, dtype: str) -> torch.Tensor:
        """Row-major, on the host. CompareError without the library, ValueError or OSError for a
        damaged file.
        """
        opened = self._files.get(file)
        if opened is None:
            opened = self._files[file] = self._open(file)
        tensor: torch.Tensor = opened.get_tensor(key)
        return torch.view_as_complex(tensor) if dtype in _COMPLEX else tensor

    def _open(self, file: str) -> Any:
        # Never another directory, whatever the index says: somebody else may have written it.
        path = os.path.join(self._place, os.path.basename(file))
        try:
            from safetensors import SafetensorError, safe_open
        except ModuleNotFoundError as error:
            raise CompareError(
                explain(
                    "the values of a dump can't be read without the package safetensors",
                    expected="it is installed",
                    came=path,
                    do='pip install "fastcheck[tools]"',
                )
            ) from error
        try:
            return safe_open(path, framework="pt")
        except SafetensorError as error:
            raise ValueError(f"{path}: {error}") from error


def value_of(entry: dict[str, Any]) -> Optional[tuple[str, str]]:
    """(file, key) of a tensor of the index; None where its value was not written."""
    value = entry.get("value")
    if isinstance(value, list) and len(value) == 2 and all(isinstance(v, str) for v in value):
        return value[0], value[1]
    return None
