"""verify(): compares a checkpoint's tensors with its seal, and checks that they are finite."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Optional

import numpy as np
import torch

from fastcheck.comparison.sources.checkpoint import CheckpointSource, record_of
from fastcheck.comparison.sources.files import Loader
from fastcheck.errors import CompareError, explain, first_line
from fastcheck.record.format import DTYPES
from fastcheck.statistics.functions import stats
from fastcheck.utils.reading import read_json

from .parts import slice_of
from .seal import FORMATS, seal_path

__all__ = ["Verification", "verify"]

# In checkpoints of Lightning: the state of callbacks, whose best score so far begins as infinity.
_NOT_TRAINED = "callbacks."
_PLACE = ("offsets", "sizes")


@dataclass(frozen=True)
class Verification:
    """What verify() found. ``bool()`` of it: the checkpoint is as it was sealed, and finite.

    ``equal``: how many tensors are equal to the bit. ``differing``: keys of tensors whose bits
    differ, each with what differs first (dtype, numel, values). ``missing``: sealed keys that no
    file holds. ``nonfinite``: tensors of the checkpoint, sealed or not, that hold NaN or
    infinities, each with their number. ``notes``: what could not be read or was not sealed.
    """

    path: str
    step: Optional[int]
    verdict: str
    equal: int
    differing: dict[str, str]
    missing: tuple[str, ...]
    nonfinite: dict[str, int]
    notes: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.equal) and not (self.differing or self.missing or self.nonfinite)

    def to_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        return {
            "path": self.path,
            "ok": bool(self),
            "step": self.step,
            "sealed_as": self.verdict,
            "equal": self.equal,
            "differing": self.differing,
            "missing": list(self.missing),
            "nonfinite": self.nonfinite,
            "notes": list(self.notes),
        }


def verify(checkpoint: str, *, trust: bool = False) -> Verification:
    """Reads a checkpoint and holds it to its seal.

    Args:
        checkpoint: a file of torch, safetensors or NumPy, or a directory of them, such as a sharded
            one.
        trust: load files that torch.load reads only with ``weights_only=False``, which runs code
            of the file.

    Raises:
        CompareError: there is no seal or no checkpoint, or it can't be read.

    Reads on the host, a tensor at a time.
    """
    content = _read_seal(seal_path(checkpoint))
    sealed: dict[str, dict[str, Any]] = content["tensors"]
    source = CheckpointSource(checkpoint, trust)
    of_name = _keys_by_name(sealed, source.tensors)
    differing: dict[str, str] = {}
    nonfinite: dict[str, int] = {}
    notes = [
        *source.notes,
        *(f"{k} was not sealed: {why}" for k, why in content["unsealed"].items()),
    ]
    present: set[str] = set()
    for name, load in source.tensors.items():
        record, extra = record_of(load)
        key = of_name.get(name)
        if extra.problem:
            if key is not None:
                differing[key] = f"can't be read: {extra.problem}"
            else:
                notes.append(f"{name} can't be read: {extra.problem}")
            continue
        bad = int(record["nan_count"] + record["posinf_count"] + record["neginf_count"])
        if bad and key is None and name.startswith(_NOT_TRAINED):
            notes.append(f"{name} holds {bad:,} NaN or infinities, and is not a weight")
        elif bad:
            nonfinite[key or name] = bad
        if key is not None:
            present.add(key)
            difference = _difference(record, sealed[key]) or _different_part(load, sealed[key])
            if difference:
                differing[key] = difference
    # Of tied weights, one that is there stands for the others.
    held = {sealed[key].get("tied_to", key) for key in present if key not in differing}
    missing = tuple(
        key
        for key in sealed
        if key not in present
        and key not in differing
        and sealed[key].get("tied_to", key) not in held
    )
    return Verification(
        path=checkpoint,
        step=content["step"],
        verdict=content["verdict"],
        equal=len(sealed) - len(differing) - len(missing),
        differing=differing,
        missing=missing,
        nonfinite=nonfinite,
        notes=tuple(notes),
    )


def _read_seal(path: str) -> dict[str, Any]:
    hint = "fastcheck.seal(checkpoint, model) writes one"
    try:
        content = read_json(path)
    except FileNotFoundError as error:
        raise CompareError(
            explain("the checkpoint has no seal", expected=path, got="no such file", hint=hint)
        ) from error
    except (OSError, ValueError) as error:
        raise CompareError(
            explain("the seal can't be read", expected="JSON", got=f"{path}: {first_line(error)}")
        ) from error
    if not _is_seal(content):
        raise CompareError(
            explain(
                "this file is not a seal, or is one of a later version",
                expected=f'JSON with "fastcheck": "seal" of format {FORMATS[-1]} or before',
                got=path,
                hint=hint,
            )
        )
    made: dict[str, Any] = content
    return made


def _is_seal(content: Any) -> bool:
    if not isinstance(content, dict) or content.get("fastcheck") != "seal":
        return False
    if content.get("format") not in FORMATS or not isinstance(content.get("unsealed"), dict):
        return False
    step, tensors = content.get("step", False), content.get("tensors")
    return (
        isinstance(tensors, dict)
        and isinstance(content.get("verdict"), str)
        and (step is None or (isinstance(step, int) and not isinstance(step, bool)))
        and all(map(_is_entry, tensors.values()))
    )


def _is_entry(entry: Any) -> bool:
    if not isinstance(entry, dict):
        return False
    parts = entry.get("parts", [entry])
    return (
        isinstance(parts, list)
        and all(isinstance(part, dict) for part in parts)
        and all(isinstance(part.get("checksum"), str) for part in parts)
        and all(_are_numbers(part.get(n)) for part in entry.get("parts", ()) for n in _PLACE)
        and isinstance(entry.get("dtype"), str)
        and isinstance(entry.get("numel"), int)
        and isinstance(entry.get("tied_to", ""), str)
    )


def _are_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(n, int) and n >= 0 for n in value)


def _keys_by_name(sealed: Iterable[str], names: Iterable[str]) -> dict[str, str]:
    """The key of the state_dict that each tensor of the checkpoint is: its name, or its name
    without a wrapper such as ``model.`` or ``state_dict.``, where that is unambiguous.
    """
    keys, found = set(sealed), {}
    below: dict[str, list[str]] = {}
    for name in names:
        if name in keys:
            found[name] = name
            continue
        parts = name.split(".")
        for start in range(1, len(parts)):
            key = ".".join(parts[start:])
            if key in keys:
                below.setdefault(key, []).append(name)
                break
    taken = set(found.values())
    for key, wrapped in below.items():
        if key not in taken and len(wrapped) == 1:
            found[wrapped[0]] = key
    return found


def _difference(record: np.void, entry: dict[str, Any]) -> str:
    dtype = DTYPES[int(record["dtype"])].name
    if dtype != entry["dtype"]:
        return f"dtype {dtype}, sealed as {entry['dtype']}"
    if int(record["numel"]) != entry["numel"]:
        return f"{int(record['numel']):,} elements, sealed as {entry['numel']:,}"
    if "parts" not in entry and f"{int(record['checksum']):016x}" != entry["checksum"]:
        return "other values"
    return ""


def _different_part(load: Loader, entry: Mapping[str, Any]) -> str:
    """The parts of several ranks are slices of the tensor that the checkpoint holds."""
    if "parts" not in entry:
        return ""
    whole = load()
    is_sealed = torch.zeros(whole.shape, dtype=torch.bool)
    for part in entry["parts"]:
        own, mark = slice_of(whole, part), slice_of(is_sealed, part)
        if own is None or mark is None:
            return f"shape {tuple(whole.shape)}, in which there is no part {_range(part)}"
        if f"{stats(own.detach(), order='logical').checksum:016x}" != part["checksum"]:
            return f"other values in the part {_range(part)}"
        mark.fill_(True)
    return "" if is_sealed.all() else "the seal lacks parts of it"


def _range(part: Mapping[str, Any]) -> str:
    """As an index in Python: ``[4:8, 0:3]``."""
    places = zip(part["offsets"], part["sizes"])
    return "[" + ", ".join(f"{start}:{start + size}" for start, size in places) + "]"
