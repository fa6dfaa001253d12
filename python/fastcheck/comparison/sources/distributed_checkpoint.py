"""Checkpoints of torch.distributed.checkpoint (DCP): a directory with ``.metadata`` and shards.

The metadata is a pickle. It is read once, without a class or a function of the program: what it
names becomes a ``_Unpickled``, which keeps what the pickle says of it. The shards are read from
there, by torch.load with weights_only=True whatever the version of torch: DCP's own reader would
unpickle the metadata without a restriction, and in older versions the shards too.
"""

from __future__ import annotations

import copyreg
import functools
import io
import os
import pickle
from typing import Any, BinaryIO

import torch

from fastcheck.errors import CompareError, first_line
from fastcheck.utils.reading import open_regular

from .files import Loader, UntrustedError, load_restricted

_METADATA = ".metadata"
_DCP = "torch.distributed.checkpoint"
# Known names by module; Megatron Core keeps the plans of its ranks in the metadata.
_KNOWN = {
    f"{_DCP}.filesystem": {"_StorageInfo", "_StoragePrefix"},
    f"{_DCP}.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    f"{_DCP}.planner": {"SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"},
    "torch.serialization": {"_get_layout"},
}
_PATHS = {"PosixPath", "PurePosixPath", "PureWindowsPath", "WindowsPath"}

Ints = tuple[int, ...]


def is_distributed_checkpoint(directory: str) -> bool:
    """True if the directory holds a checkpoint of torch.distributed.checkpoint."""
    path = os.path.join(directory, _METADATA)
    return os.path.lexists(path) and not os.path.isdir(path)


def shard_loaders(directory: str, trust: bool) -> dict[str, Loader]:
    """The loader of each tensor, which puts it together from its shards, by name. Other values are
    left out.

    Raises:
        CompareError: the metadata can't be read. UntrustedError: it names what DCP does not.
    """
    path = os.path.join(directory, _METADATA)
    try:
        with open_regular(path) as file:
            # Objects of extension codes that the process has met are found without find_class().
            copyreg.clear_extension_cache()
            metadata = _Unpickler(file, trust).load().state
        places = {
            (index.state["fqn"], _ints(index.state["offset"])): info.state
            for index, info in metadata["storage_data"].items()
            if index.state.get("offset") is not None
        }
        stored = sum(entry.stat().st_size for entry in os.scandir(directory))
        return {
            str(name): functools.partial(_load, directory, str(name), entry.state, places, stored)
            for name, entry in metadata["state_dict_metadata"].items()
            if type(entry).__name__ == "TensorStorageMetadata"
        }
    except UntrustedError:
        raise
    except Exception as error:  # a damaged pickle may raise anything
        raise CompareError(
            "the metadata of a distributed checkpoint can't be read",
            expected="what torch.distributed.checkpoint.save() writes",
            got=f"{path}: {first_line(error)}",
        ) from error


def _load(
    directory: str,
    name: str,
    entry: dict[str, Any],
    places: dict[tuple[str, Ints], dict[str, Any]],
    stored: int,
) -> torch.Tensor:
    size, dtype = _ints(entry["size"]), _dtype(entry["properties"].state)
    if torch.Size(size).numel() * dtype.itemsize > stored:
        raise RuntimeError("it would take more bytes than the checkpoint has")
    whole, missing = torch.empty(size, dtype=dtype), torch.Size(size).numel()
    for chunk in entry["chunks"]:
        offsets, sizes = _ints(chunk.state["offsets"]), _ints(chunk.state["sizes"])
        target = whole[tuple(slice(at, at + count) for at, count in zip(offsets, sizes))]
        part = _read(directory, places[name, offsets])
        if not target.shape == part.shape == sizes:
            raise RuntimeError(f"its part at {list(offsets)} has the shape {list(part.shape)}")
        target.copy_(part)
        missing -= part.numel()
    if missing:
        raise RuntimeError(f"its parts have {missing:,} elements less than the whole")
    return whole


def _read(directory: str, info: dict[str, Any]) -> torch.Tensor:
    name, start, length = info["relative_path"], info["offset"], info["length"]
    if os.path.isabs(name) or os.pardir in name.replace("\\", "/").split("/"):
        raise RuntimeError(f"its shard {name} is not in the checkpoint")
    if info.get("transform_descriptors"):
        raise RuntimeError(f"its shard {name} is compressed or encrypted")
    with open_regular(os.path.join(directory, name)) as file:
        length = min(length, os.fstat(file.fileno()).st_size)
        file.seek(start)
        data = io.BytesIO(file.read(length))
    part = load_restricted(data)
    if not isinstance(part, torch.Tensor):
        raise RuntimeError(f"its shard {name} holds no tensor")
    return part


def _ints(held: Any) -> Ints:
    """The numbers of a torch.Size; ValueError where a number is negative."""
    numbers = tuple(int(number) for number in held.args[0])
    if any(number < 0 for number in numbers):
        raise ValueError("a negative size")
    return numbers


def _dtype(properties: Any) -> torch.dtype:
    kind = properties[0] if isinstance(properties, tuple) else properties["dtype"]
    dtype = vars(torch)[kind.__name__]
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{kind.__name__} is no dtype")
    return dtype


class _Unpickled:
    """The content of a pickle for an object: what it was made of, and its state.

    A class of the pickle is a subclass that only this pickle has; its state can't be set, because
    __setstate__() is then called without an object.
    """

    args: tuple[Any, ...] = ()
    state: Any = None

    def __new__(cls, *args: Any) -> _Unpickled:
        made = super().__new__(cls)
        made.args = args
        return made

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _EnumMember(_Unpickled):
    """A member of an enum, which early releases of Python 3.11 pickle as getattr(class, name)."""

    def __new__(cls, *args: Any) -> _EnumMember:
        kind, name = args if len(args) == 2 else (None, None)
        if not (isinstance(kind, type) and issubclass(kind, _Unpickled) and type(name) is str):
            raise _unknown("builtins.getattr")
        made = object.__new__(cls)
        made.args = args
        return made


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: BinaryIO, trust: bool) -> None:
        super().__init__(file)
        self._trust = trust
        self._classes: dict[tuple[str, str], type[_Unpickled]] = {}

    def find_class(self, module: str, name: str) -> type[_Unpickled]:
        if not self._trust and (module, name) == ("builtins", "getattr"):
            return _EnumMember
        if not (self._trust or _is_known(module, name)):
            raise _unknown(f"{module}.{name}")
        return self._classes.setdefault((module, name), type(name, (_Unpickled,), {}))


def _unknown(name: str) -> UntrustedError:
    return UntrustedError(
        "the metadata of a distributed checkpoint names something unknown",
        expected="classes of torch.distributed.checkpoint alone",
        got=name,
        hint="trust=True, or --trust, reads the tensors all the same",
    )


def _is_known(module: str, name: str) -> bool:
    if module == "torch":
        return name == "Size" or isinstance(vars(torch).get(name), torch.dtype)
    if module.partition(".")[0] == "pathlib":
        return name in _PATHS
    return name in _KNOWN.get(module, ())
