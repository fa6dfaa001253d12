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

from .seal import FORMATS, seal_path

# In checkpoints of Lightning: the state of callbacks, whose best score so far begins as infinity.
_NOT_TRAINED = "callbacks."


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
        found = {**vars(self), "ok": bool(self), "sealed_as": self.verdict}
        del found["verdict"]
        return {**found, "missing": list(self.missing), "notes": list(self.notes)}


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
    key_of = _keys_by_name(sealed, source.tensors)
    differing: dict[str, str] = {}
    nonfinite: dict[str, int] = {}
    notes = list(source.notes)
    notes += (f"{key} was not sealed: {why}" for key, why in content["unsealed"].items())
    equal: set[str] = set()
    for name, load in source.tensors.items():
        record, extra = record_of(load)
        key = key_of.get(name)
        bad = 0
        if not extra.problem:
            bad = int(record["nan_count"] + record["posinf_count"] + record["neginf_count"])
        if bad and key is None and name.startswith(_NOT_TRAINED):
            notes.append(f"{name} holds {bad:,} NaN or infinities, and is not a weight")
        elif bad:
            nonfinite[key or name] = bad
        problem = f"can't be read: {extra.problem}" if extra.problem else ""
        if key is None:
            notes += [f"{name} {problem}"] if problem else []
        elif difference := problem or _difference(record, load, sealed[key]):
            differing[key] = difference
        else:
            equal.add(key)
    # Of tied weights, one that is there stands for the others.
    held = {sealed[key].get("tied_to", key) for key in equal}
    missing = tuple(
        key
        for key, entry in sealed.items()
        if key not in equal and key not in differing and entry.get("tied_to", key) not in held
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


def _difference(record: np.void, load: Loader, entry: Mapping[str, Any]) -> str:
    """What differs first; the parts of several ranks are slices of the checkpoint's tensor."""
    dtype, numel = DTYPES[int(record["dtype"])].name, int(record["numel"])
    if dtype != entry["dtype"]:
        return f"dtype {dtype}, sealed as {entry['dtype']}"
    if numel != entry["numel"]:
        return f"{numel:,} elements, sealed as {entry['numel']:,}"
    if "parts" not in entry:
        return "" if f"{int(record['checksum']):016x}" == entry["checksum"] else "other values"
    whole = load()
    is_sealed = torch.zeros(whole.shape, dtype=torch.bool)
    for part in entry["parts"]:
        at = tuple(slice(n, n + size) for n, size in zip(part["offsets"], part["sizes"]))
        name = "[" + ", ".join(f"{one.start}:{one.stop}" for one in at) + "]"
        if len(at) != whole.dim() or any(one.stop > n for one, n in zip(at, whole.shape)):
            return f"shape {tuple(whole.shape)}, in which there is no part {name}"
        if f"{stats(whole[at].detach(), order='logical').checksum:016x}" != part["checksum"]:
            return f"other values in the part {name}"
        is_sealed[at] = True
    return "" if is_sealed.all() else "the seal lacks parts of it"


def _keys_by_name(sealed: Iterable[str], names: Iterable[str]) -> dict[str, str]:
    """The key of the state_dict that each tensor of the checkpoint is: its name, or its name
    without a wrapper such as ``model.`` or ``state_dict.``, where that is unambiguous.
    """
    keys, below = set(sealed), dict[str, list[str]]()
    for name in names:
        parts = name.split(".")
        endings = (".".join(parts[start:]) for start in range(len(parts)))
        if (key := next((ending for ending in endings if ending in keys), None)) is not None:
            below.setdefault(key, []).append(name)
    return {
        (key if key in found else found[0]): key
        for key, found in below.items()
        if key in found or len(found) == 1
    }


def _read_seal(path: str) -> dict[str, Any]:
    hint = "fastcheck.seal(checkpoint, model) writes one"
    try:
        content = read_json(path)
    except FileNotFoundError as error:
        text = explain("the checkpoint has no seal", expected=path, got="no such file", hint=hint)
        raise CompareError(text) from error
    except (OSError, ValueError) as error:
        got = f"{path}: {first_line(error)}"
        raise CompareError(explain("the seal can't be read", expected="JSON", got=got)) from error
    if not _is_seal(content):
        text = "this file is not a seal, or is one of a later version"
        expected = f'JSON with "fastcheck": "seal" of format {FORMATS[-1]} or before'
        raise CompareError(explain(text, expected=expected, got=path, hint=hint))
    made: dict[str, Any] = content
    return made


def _is_seal(content: Any) -> bool:
    return (
        _has(content, fastcheck=str, format=int, unsealed=dict, verdict=str, tensors=dict)
        and content["fastcheck"] == "seal"
        and content["format"] in FORMATS
        and type(content.get("step", False)) in (int, type(None))
        and all(map(_is_entry, content["tensors"].values()))
    )


def _is_entry(entry: Any) -> bool:
    if not _has(entry, dtype=str, numel=int) or not isinstance(entry.get("tied_to", ""), str):
        return False
    if "parts" not in entry:
        return _has(entry, checksum=str)
    return isinstance(entry["parts"], list) and all(
        _has(part, checksum=str, offsets=list, sizes=list)
        and all(type(n) is int and n >= 0 for n in part["offsets"] + part["sizes"])
        for part in entry["parts"]
    )


def _has(value: Any, **kinds: type) -> bool:
    """Whether this is an object of JSON with members of these types."""
    return isinstance(value, dict) and all(type(value.get(n)) is kinds[n] for n in kinds)
