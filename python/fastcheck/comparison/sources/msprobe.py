"""Reads a dump of msprobe as a side of a comparison: dump.json, with .pt and .npy files.

Its names correspond to fastcheck's in another notation:
``Module.layers.3.attn.Attention.forward.0`` is the first call of ``layers.3.attn``,
``Functional.linear.2.backward`` the gradient of the third ``linear``. Written from dumps of
mindstudio-probe 26.2.0."""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Iterator
from typing import Any, Optional

import numpy as np
import torch

from fastcheck.comparison.block import SOME, UNKNOWN_COUNT, Block, Extra, Kind, Phase, Source
from fastcheck.comparison.names import Name, NameTable, Renaming
from fastcheck.dump.api_calls import may_write
from fastcheck.errors import CompareError
from fastcheck.record.format import DTYPES, NONFINITE_COUNTS, RECORD_DTYPE, RECORD_VERSION, Depth
from fastcheck.utils.names.msprobe import plain_api
from fastcheck.utils.reading import read_json

from .checkpoint import record_of
from .dump import named_input
from .files import load_array, load_file

_MODULE = re.compile(r"(?:Module|Cell)\.(?:(.+)\.)?([^.]+)\.(forward|backward)\.(\d+)")
_GRADIENT = re.compile(r"(?:Module|Cell)\.(?:(.+)\.)?([^.]+)\.parameters_grad(?:\.\d+)?")
_API = re.compile(r"([A-Za-z]+\.[^.]+(?:\.[^.]+)*?)\.(\d+)\.(forward|backward)")
_STEP = re.compile(r"step(\d+)")
_RANK = re.compile(r"(?:rank|proc)(\d+)")
_CODES = {info.name: info.code for info in DTYPES}
_ALIASES = {"half": "float16", "float": "float32", "double": "float64", "long": "int64"}
_ALIASES.update({"int": "int32", "short": "int16"})
# More than any memory holds.
_MAX_NUMEL = 1 << 60


def is_msprobe(path: str) -> bool:
    """True if there is a dump.json at ``path``, or in the step and rank directories below it."""
    return any(True for _ in _dumps(path))


def _dumps(path: str) -> Iterator[tuple[int, str, str]]:
    """(step, name of the rank's directory, path of its dump.json)."""
    is_file = os.path.basename(path) == "dump.json" and os.path.isfile(path)
    own = path if is_file else os.path.join(path, "dump.json")
    if os.path.isfile(own):
        yield 0, "rank0", own
        return
    if not os.path.isdir(path):
        return
    for name in sorted(os.listdir(path)):
        below = os.path.join(path, name)
        step = _STEP.fullmatch(name)
        if step and os.path.isdir(below):
            yield from ((int(step.group(1)), rank, file) for rank, file in _rank_files(below))
    yield from ((0, rank, file) for rank, file in _rank_files(path))


def _rank_files(path: str) -> Iterator[tuple[str, str]]:
    for name in sorted(os.listdir(path)):
        file = os.path.join(path, name, "dump.json")
        if _RANK.fullmatch(name) and os.path.isfile(file):
            yield name, file


class MsprobeSource(Source):
    """``path``: what msprobe calls dump_path, a step or a rank below it, or a dump.json."""

    kind = Kind.MSPROBE

    def __init__(self, path: str, trust: bool = False) -> None:
        self.title = path
        self.notes: list[str] = []
        self.settings: dict[Phase, Any] = {}
        self._trust = trust
        #: The functions and inputs that are parameters, if calls of the API are compared with
        #: fastcheck's, which knows.
        self.parameters: Optional[frozenset[tuple[str, str]]] = None
        self._files: dict[tuple[int, int], str] = {}
        for step, name, file in _dumps(path):
            digits = _RANK.fullmatch(name)
            # "proc<pid>" is what a run without torch.distributed has: rank 0.
            is_rank = name.startswith("rank") and digits is not None
            rank = int(digits.group(1)) if is_rank and digits is not None else 0
            if (step, rank) in self._files:
                self.notes.append(f"{file} is left out: another dump of step {step}, rank {rank}")
                continue
            self._files[step, rank] = file

    def places(self) -> list[tuple[int, int]]:
        return sorted(self._files)

    def levels(self) -> set[str]:
        """The levels that Dumper has of what its first step holds: ``"module"``, ``"api"``, with
        mix both.
        """
        calls = _read_json(self._files[min(self._files)]) if self._files else ()
        levels = {"module"} if any(map(_MODULE.fullmatch, calls)) else set()
        return levels | ({"api"} if any(map(_api, calls)) else set())

    def functions_called(self) -> frozenset[str]:
        """The functions of the API that its steps have."""
        keys = {_api(key) for file in self._files.values() for key in _read_json(file)}
        return frozenset(plain_api(key) for key in keys if key)

    def block(
        self, step: int, rank: int, names: NameTable, renaming: Renaming, is_first: bool
    ) -> Block:
        file = self._files[step, rank]
        tensors: list[tuple[int, int, np.void, Extra]] = []
        seen_input = False
        calls = _read_json(file)
        backwards = [place for place, key in enumerate(calls) if ".backward" in key]
        last_backward = backwards[-1] if backwards else len(calls)
        made_here: set[object] = set()
        for place, (key, data) in enumerate(calls.items()):
            for name, phase, value in _named_tensors(
                key, data, renaming, self.parameters is not None
            ):
                if phase == Phase.BATCHES and seen_input:
                    phase = Phase.FORWARD
                if name.op and name.direction == "forward":
                    if place > last_backward:
                        # The optimizer's own calls of the API.
                        phase = Phase.UPDATE
                    elif name.role == "output":
                        made_here.add(_content(value))
                    elif self._is_parameter(name, value, made_here):
                        phase, name = Phase.WEIGHTS, name._replace(role="param")
                if phase == Phase.WEIGHTS and not is_first:
                    phase = Phase.UPDATE
                record, extra = self._tensor(value, os.path.dirname(file))
                record["step"] = step
                tensors.append((names.number(name), phase, record, extra))
            # The first call of a step reads the batch.
            seen_input = True
        return Block.of(step, rank, tensors)

    def _is_parameter(self, name: Name, value: dict[str, Any], made: set[object]) -> bool:
        if self.parameters is not None:
            return (name.op, name.label) in self.parameters
        # No call has made it, and it has a gradient.
        return value.get("requires_grad") is True and _content(value) not in made

    def _tensor(self, value: dict[str, Any], directory: str) -> tuple[np.void, Extra]:
        file = value.get("data_name")
        shape = _shape(value.get("shape"))
        wants = value.get("requires_grad")
        requires_grad = wants if isinstance(wants, bool) else None
        if isinstance(file, str) and file not in ("", "-1"):
            # Never the dump_data_dir that the file names: another machine wrote it.
            path = os.path.join(directory, "dump_tensor_data", os.path.basename(file))
            if os.path.isfile(path):
                record, extra = record_of(lambda: _load_value(path, self._trust))
                if extra.load is not None:
                    return record.copy(), Extra(shape, requires_grad, None, extra.load)
                self.notes.append(f"{path} can't be read ({extra.problem}): by its statistics")
        crc32 = value.get("md5")
        crc32 = crc32.lower() if isinstance(crc32, str) and crc32 else None
        return _record_of_statistics(value, shape), Extra(shape, requires_grad, crc32)


def _content(value: dict[str, Any]) -> object:
    """Equal for a tensor that is read where it was made."""
    fields = ("dtype", "Max", "Min", "Mean", "Norm", "md5")
    return (*_shape(value.get("shape")), *(str(value.get(field)) for field in fields))


def _shape(value: Any) -> tuple[int, ...]:
    """Empty where the file has none that a tensor can have."""
    sizes = value if isinstance(value, list) else []
    if all(isinstance(n, int) and n >= 0 for n in sizes) and math.prod(sizes) <= _MAX_NUMEL:
        return tuple(sizes)
    return ()


def _load_value(path: str, trust: bool) -> torch.Tensor:
    if path.endswith(".npy"):
        return load_array(path)
    loaded = load_file(path, trust)
    if not isinstance(loaded, torch.Tensor):
        raise ValueError(f"{os.path.basename(path)} holds a {type(loaded).__name__}, no tensor")
    return loaded


def _read_json(file: str) -> dict[str, Any]:
    try:
        data = read_json(file)["data"]  # bare NaN and Infinity too, which msprobe writes
        if not isinstance(data, dict):
            raise TypeError("data is not an object")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CompareError(
            "this dump.json can't be read",
            expected='what msprobe writes: a JSON object with "data"',
            got=f"{file}: {error}",
            hint="dump again; a run that was killed leaves it half written",
        ) from error
    return data


def _named_tensors(
    key: str, data: Any, renaming: Renaming, is_ordered: bool
) -> Iterator[tuple[Name, Phase, dict[str, Any]]]:
    if not isinstance(data, dict):
        return
    gradient = _GRADIENT.fullmatch(key)
    if gradient:
        for label, value in data.items():
            for _, item in _leaves(value, ""):
                name = _parameter(gradient.group(1) or "", label, "param_grad", renaming)
                yield name, Phase.GRADIENTS, item
        return
    module = _MODULE.fullmatch(key)
    api = None if module else _API.fullmatch(key)
    if module:
        path, op, forward = renaming(module.group(1) or ""), "", module.group(3) == "forward"
    elif api:
        path, op, forward = "", renaming(plain_api(api.group(1))), api.group(3) == "forward"
    else:
        path, op, forward = "", renaming(key), True
    roles = (
        {"input_args": "input", "input_kwargs": "input", "output": "output"}
        if forward
        # A backward reads the gradient of what the forward returned.
        else {"input": "grad_output", "output": "grad_input"}
    )
    if is_ordered and forward and api and _is_query(api.group(1), data):
        return
    direction = "forward" if forward else "backward"
    inputs = itertools.count()
    for part, role in roles.items():
        if is_ordered and op and role == "grad_input":
            continue  # of the last operator of the call, not of what the call was given
        start = "input" if role.endswith("input") else "output"
        phase = Phase.GRADIENTS if not forward else Phase.FORWARD
        if role == "input":
            phase = Phase.BATCHES
        for label, item in _leaves(data.get(part), start):
            if is_ordered and op and role == "input":
                label = named_input(next(inputs))
            yield Name(path, direction, role, label, op), phase, item
    parameters = data.get("parameters")
    for label, value in parameters.items() if isinstance(parameters, dict) else ():
        for _, item in _leaves(value, ""):
            parent = module.group(1) if module else None
            yield _parameter(parent or "", label, "param", renaming), Phase.WEIGHTS, item


def _api(key: str) -> str:
    """The name of the function in a call's key; empty of a module."""
    match = None if _MODULE.fullmatch(key) else _API.fullmatch(key)
    return match.group(1) if match else ""


def _is_query(function: str, data: dict[str, Any]) -> bool:
    """True if a call neither returns nor writes a tensor, as torch.equal(): a dump of fastcheck has
    nothing of it.
    """
    return not may_write(function, {}) and not any(_leaves(data.get("output"), ""))


def _parameter(module: str, label: str, role: str, renaming: Renaming) -> Name:
    path, _, last = renaming(f"{module}.{label}" if module else label).rpartition(".")
    return Name(path, "optimizer", role, last)


def _leaves(value: Any, label: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The tensors below, labelled as fastcheck labels them."""
    if isinstance(value, dict):
        if isinstance(value.get("type"), str):
            if "Tensor" in value["type"] or "Parameter" in value["type"]:
                yield label, value
            return
        for key, item in value.items():
            yield from _leaves(item, f"{label}.{key}")
    elif isinstance(value, list):
        for position, item in enumerate(value):
            yield from _leaves(item, f"{label}[{position}]")


def _record_of_statistics(value: dict[str, Any], shape: tuple[int, ...]) -> np.void:
    """A record of the statistics in dump.json; the other fields are unknown."""
    made = np.zeros(1, RECORD_DTYPE)
    name = str(value.get("dtype", "")).split(".")[-1].lower()
    code = _CODES.get(_ALIASES.get(name, name), _CODES["float32"])
    numel = math.prod(shape)
    made["version"], made["dtype"], made["numel"] = RECORD_VERSION, code, numel
    made["depth"] = Depth.STATS
    for field in RECORD_DTYPE.names or ():
        if field.endswith("_count"):
            made[field] = UNKNOWN_COUNT
    low, high, mean, norm = (_float_or_none(value.get(k)) for k in ("Min", "Max", "Mean", "Norm"))
    known = [number for number in (low, high, norm) if number is not None]
    if any(not math.isfinite(number) for number in known):
        made["nan_count"] = SOME  # without a count
    elif norm is not None:
        for field in NONFINITE_COUNTS:
            made[field] = 0
    for field, number in (("min", low), ("max", high)):
        typed = made[field].view("<" + DTYPES[code].kind)
        if typed.dtype.kind == "f":
            typed[0] = _float(number)
        elif number is not None and math.isfinite(number):
            # The ends of a range may have been rounded up beyond it, to a float's.
            ends = np.iinfo(typed.dtype)
            typed[0] = min(max(int(number), ends.min), ends.max)
    made["sum"] = _float(None if mean is None else mean * numel)
    made["abs_sum"] = _float(None)
    made["sum_sq"] = _float(None if norm is None else norm * norm)
    return made[0]


def _float_or_none(value: Any) -> Optional[float]:
    try:
        return float(value)
    except (OverflowError, TypeError, ValueError):
        return None


def _float(value: Optional[float]) -> np.float64:
    return np.float64(math.nan if value is None else value)
