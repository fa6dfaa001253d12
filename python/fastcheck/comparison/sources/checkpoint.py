"""Checkpoints as a side of a comparison: .pt and .pth, safetensors, .npy and .npz, alone or many in
a directory, and mappings of tensors in memory.

Nothing of a file is executed: torch.load runs with weights_only=True, NumPy without pickles, unless
``trust`` says otherwise.
"""

from __future__ import annotations

import os
import pickle
import zipfile
from collections.abc import Iterator, Mapping
from typing import Any, Callable, Optional

import numpy as np
import torch

from ..._errors import CompareError, UnsupportedTensorError, explain
from ..._ops import stats
from ..._record import RECORD_DTYPE
from ..block import Block, Extra, Kind, Phase
from ..names import Name, NameTable, Renaming

__all__ = [
    "SUFFIXES",
    "CheckpointSource",
    "MemorySource",
    "flatten",
    "load_array",
    "load_file",
    "record_of",
]

SUFFIXES = (".pt", ".pth", ".bin", ".safetensors", ".npy", ".npz")
#: What a file that is one tensor, and nothing else, calls it.
LONE = "tensor"
_LIMIT_OF_DEPTH = 32

Loader = Callable[[], torch.Tensor]


class MemorySource:
    """Named tensors, each behind a function that loads it, and values beside them."""

    kind = Kind.CHECKPOINT

    def __init__(
        self, title: str, tensors: Mapping[str, Loader], values: Mapping[str, Any] | None = None
    ) -> None:
        self.title = title
        self.notes: list[str] = []
        self._tensors = dict(tensors)
        self.settings: dict[Phase, Any] = {Phase.HYPERPARAMETERS: dict(values or {}) or None}

    @property
    def has_tensors(self) -> bool:
        return bool(self._tensors)

    def places(self) -> list[tuple[int, int]]:
        return [(0, 0)]

    def is_cut(self, step: int, rank: int) -> bool:
        return False

    def block(
        self, step: int, rank: int, names: NameTable, renaming: Renaming, is_first: bool
    ) -> Block:
        """Reads every tensor once."""
        numbers, phases, extras = [], [], []
        records = np.zeros(len(self._tensors), RECORD_DTYPE)
        for index, (name, load) in enumerate(self._tensors.items()):
            numbers.append(names.number(Name("", "", "", renaming(name))))
            phases.append(Phase.UPDATE if _is_state(name) else Phase.WEIGHTS)
            record, extra = record_of(load)
            records[index] = record
            extras.append(extra)
        return Block(
            step, rank, np.array(numbers, np.int64), np.array(phases, np.uint8), records, extras
        )


class CheckpointSource(MemorySource):
    """A file, or all checkpoint files of a directory. CompareError when one can't be read."""

    def __init__(self, path: str, trust: bool = False) -> None:
        if not os.path.isdir(path):
            tensors, values = _open(path, trust)
            super().__init__(path, tensors, values)
            return
        opened: dict[str, tuple[dict[str, Loader], dict[str, Any]]] = {}
        left_out = []
        for name in sorted(_files(path)):
            try:
                opened[name] = _open(os.path.join(path, name), trust)
            except _UntrustedError:
                # A directory of Hugging Face's has pickled arguments beside the weights.
                left_out.append(f"{name} is left out: loading it would run code (trust=, --trust)")
        tensors, values = {}, {}
        inner = [name for part, _ in opened.values() for name in part if name != LONE]
        clash = len(set(inner)) < len(inner)
        for name, (part, settings) in opened.items():
            stem = os.path.splitext(name)[0].replace(os.sep, ".")
            for key, load in part.items():
                tensors[stem if key == LONE else f"{stem}.{key}" if clash else key] = load
            if settings:
                values[stem] = settings
        super().__init__(path, tensors, values)
        self.notes += left_out


class _UntrustedError(CompareError):
    """A file that can only be read by running what it brings along."""

    __module__ = "fastcheck"


def _files(directory: str) -> Iterator[str]:
    for place, _, names in os.walk(directory):
        for name in names:
            if name.endswith(SUFFIXES):
                yield os.path.relpath(os.path.join(place, name), directory)


def _is_state(name: str) -> bool:
    parts = name.lower().split(".")
    return any(part.startswith("optim") for part in parts[:-1]) or parts[-1] in (
        "exp_avg",
        "exp_avg_sq",
        "momentum_buffer",
    )


def record_of(load: Loader) -> tuple[np.void, Extra]:
    """The Record of a tensor, row-major so that its layout doesn't matter, and the rest."""
    empty: np.void = np.zeros(1, RECORD_DTYPE)[0]
    try:
        tensor = load()
    except CompareError:
        raise
    except (OSError, ValueError, RuntimeError, zipfile.BadZipFile, EOFError) as error:
        return empty, Extra(problem=_first_line(error))
    shape = tuple(tensor.shape)
    try:
        record = stats(tensor.detach(), depth="full", order="logical").record
    except UnsupportedTensorError as error:
        return empty, Extra(shape=shape, problem=_first_line(error))
    return record, Extra(shape=shape, load=load)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


# Files


def _open(path: str, trust: bool) -> tuple[dict[str, Loader], dict[str, Any]]:
    suffix = os.path.splitext(path)[1]
    try:
        if suffix == ".safetensors":
            return _safetensors(path), {}
        if suffix == ".npy":
            load_array(path)  # a damaged file is said at once
            return {LONE: lambda: load_array(path)}, {}
        if suffix == ".npz":
            # Opened here: NumPy leaves the file open when the archive is damaged.
            with open(path, "rb") as file, np.load(file, allow_pickle=False) as archive:
                found = list(archive.files)
            return {name: _of_archive(path, name) for name in found}, {}
        return flatten(load_file(path, trust))
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise _unreadable(path, error) from error


def _safetensors(path: str) -> dict[str, Loader]:
    """Read by the library of that name, which maps the file."""
    try:
        from safetensors import SafetensorError, safe_open
    except ModuleNotFoundError as error:
        raise CompareError(
            explain(
                "a safetensors file can't be read without the package safetensors",
                expected="it is installed",
                came=path,
                do='pip install "fastcheck[tools]"',
            )
        ) from error
    try:
        file: Any = safe_open(path, framework="pt")
        names = list(file.keys())
    except SafetensorError as error:
        raise _unreadable(path, error) from error

    def of(name: str) -> Loader:
        def load() -> torch.Tensor:
            try:
                tensor: torch.Tensor = file.get_tensor(name)
            except SafetensorError as error:
                raise ValueError(str(error)) from error
            return tensor

        return load

    return {name: of(name) for name in names}


def _of_archive(path: str, name: str) -> Loader:
    return lambda: load_array(path, name)


def load_array(path: str, name: Optional[str] = None) -> torch.Tensor:
    """An array of a .npy file, mapped, or that of this name in an .npz."""
    if name is None:
        array = np.load(path, mmap_mode="c", allow_pickle=False)
    else:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as archive:
            array = archive[name]
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if array.dtype.kind == "V" and array.dtype.itemsize == 2:
        # What NumPy makes of ml_dtypes.bfloat16 in a file.
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    if array.dtype.kind not in "fciub":
        raise ValueError(f"an array of {array.dtype}, which holds no numbers")
    if 0 in array.shape:
        array = np.array(array)  # nothing to map
    return torch.from_numpy(array if array.ndim else array.reshape(1)).reshape(array.shape)


def load_file(path: str, trust: bool = False) -> Any:
    """torch.load of a file onto the host, mapped where its format allows. CompareError when it is
    damaged, or holds more than tensors and plain values and isn't trusted.
    """
    last: Exception = ValueError("not read")
    for options in ({"mmap": True}, {}):
        try:
            return torch.load(path, map_location="cpu", weights_only=not trust, **options)
        except pickle.UnpicklingError as error:
            if trust or not _is_about_trust(error):
                raise _unreadable(path, error) from error
            raise _UntrustedError(
                explain(
                    "loading this file would run code that it brings along",
                    expected="tensors and plain values (torch.load(..., weights_only=True))",
                    came=f"{path}: {_culprit(error)}",
                    do="save the state_dict() alone, or, if you trust where the file comes from, "
                    "trust=True (--trust)",
                )
            ) from error
        except (RuntimeError, ValueError, EOFError, OSError, KeyError, zipfile.BadZipFile) as error:
            last = error
        except Exception as error:  # a damaged pickle may raise anything
            raise _unreadable(path, error) from error
    raise _unreadable(path, last) from last


def _is_about_trust(error: Exception) -> bool:
    # What torch's restricted unpickler says of globals and classes, and not of damage.
    return any(word in str(error) for word in ("GLOBAL", "allowlisted", "must be imported"))


def _culprit(error: Exception) -> str:
    text = str(error)
    for line in text.splitlines():
        if "Unsupported" in line or "GLOBAL" in line:
            return line.strip()[:200]
    return _first_line(error)[:200]


def _unreadable(path: str, error: Exception) -> CompareError:
    reason = getattr(error, "strerror", None) or _first_line(error) or type(error).__name__
    return CompareError(
        explain(
            "this file can't be read",
            expected="a whole file of the kind that its name says: " + ", ".join(SUFFIXES),
            came=f"{path}: {reason[:300]}",
            do="copy or write the file again",
        )
    )


def flatten(loaded: Any) -> tuple[dict[str, Loader], dict[str, Any]]:
    """The tensors of a (nested) state_dict under dotted names, and its other values."""
    if isinstance(loaded, torch.Tensor):
        return {LONE: lambda: loaded}, {}
    tensors: dict[str, Loader] = {}
    values: dict[str, Any] = {}
    _walk(loaded, (), tensors, values, 0)
    return tensors, values


def _walk(
    value: Any,
    path: tuple[str, ...],
    tensors: dict[str, Loader],
    values: dict[str, Any],
    depth: int,
) -> None:
    if isinstance(value, torch.Tensor):
        tensors[".".join(path)] = lambda: value
    elif isinstance(value, np.ndarray) and value.dtype.kind in "fciub":
        tensors[".".join(path)] = lambda: torch.from_numpy(np.array(value))
    elif depth < _LIMIT_OF_DEPTH and isinstance(value, Mapping):
        for key, item in value.items():
            _walk(item, (*path, str(key)), tensors, values, depth + 1)
    elif depth < _LIMIT_OF_DEPTH and isinstance(value, (list, tuple)):
        for position, item in enumerate(value):
            _walk(item, (*path, str(position)), tensors, values, depth + 1)
    elif isinstance(value, (bool, int, float, str)) or value is None:
        values[".".join(path)] = value
