"""Checkpoints of torch.distributed.checkpoint (DCP): a directory with ``.metadata`` and shards.

The metadata is a pickle. It is unpickled here with nothing but DCP's own classes first, and torch,
which does so without a restriction, reads it only if that succeeds.
"""

from __future__ import annotations

import functools
import importlib
import os
import pickle
import warnings
from typing import Any

import torch

from fastcheck.errors import CompareError, explain, first_line

from .files import Loader, UntrustedError

__all__ = ["is_distributed_checkpoint", "shard_loaders"]

_METADATA = ".metadata"
_MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
# Data classes: Megatron Core keeps the plans of its ranks in the metadata.
_PLANS = "torch.distributed.checkpoint.planner"
_OF_PLANS = ("SavePlan", "TensorWriteData", "WriteItem", "WriteItemType")
_PATHS = ("PosixPath", "PurePosixPath", "PureWindowsPath", "WindowsPath")
# A function, from the name of a layout to the layout.
_LAYOUT = "torch.serialization", "_get_layout"


def is_distributed_checkpoint(directory: str) -> bool:
    """Whether the directory holds a checkpoint of torch.distributed.checkpoint."""
    return os.path.isfile(os.path.join(directory, _METADATA))


def shard_loaders(directory: str, trust: bool) -> dict[str, Loader]:
    """What loads each tensor, put together from its shards, by name. Other values are left out.

    Raises:
        CompareError: the metadata can't be read. UntrustedError: not without running it.
    """
    path = os.path.join(directory, _METADATA)
    try:
        with open(path, "rb") as file:
            metadata = (pickle.Unpickler if trust else _Restricted)(file).load()
        entries = dict(metadata.state_dict_metadata)
    except UntrustedError:
        raise
    except Exception as error:  # a damaged pickle may raise anything
        raise CompareError(
            explain(
                "the metadata of a distributed checkpoint can't be read",
                expected="what torch.distributed.checkpoint.save() writes",
                got=f"{path}: {first_line(error)}",
            )
        ) from error
    stored = sum(os.path.getsize(os.path.join(directory, name)) for name in os.listdir(directory))
    return {
        name: functools.partial(_load, directory, name, entry, stored)
        for name, entry in entries.items()
        if type(entry).__name__ == "TensorStorageMetadata"
    }


def _load(directory: str, name: str, entry: Any, stored: int) -> torch.Tensor:
    dcp: Any = importlib.import_module("torch.distributed.checkpoint")  # some torch lack it
    size, dtype = tuple(entry.size), entry.properties.dtype
    if torch.Size(size).numel() * dtype.itemsize > stored:
        raise RuntimeError("it would take more bytes than the checkpoint has")
    tensor = torch.empty(size, dtype=dtype)
    with warnings.catch_warnings():  # of a process without other ranks
        warnings.simplefilter("ignore")
        reader = dcp.FileSystemReader(directory)
        try:
            dcp.load({name: tensor}, storage_reader=reader, no_dist=True)
        except dcp.CheckpointException as error:  # no Exception, but a BaseException
            causes = [first_line(cause) for cause, _ in error.failures.values()]
            raise RuntimeError("; ".join(causes)) from None
    return tensor


class _Restricted(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found: Any = None
        is_path = module.partition(".")[0] == "pathlib" and name in _PATHS
        if module in _MODULES or module.startswith("torch.distributed.checkpoint."):
            found = getattr(importlib.import_module(module), name, None)
            found = found if isinstance(found, type) and found.__module__ in _MODULES else None
            if module == _PLANS and name in _OF_PLANS:
                found = getattr(importlib.import_module(module), name)
        elif module == "torch":
            value = getattr(torch, name, None)
            found = value if value is torch.Size or isinstance(value, torch.dtype) else None
        elif (module, name) == _LAYOUT or is_path:
            found = super().find_class(module, name)
        if found is None:
            raise UntrustedError(
                explain(
                    "the metadata of a distributed checkpoint names something unknown",
                    expected="classes of torch.distributed.checkpoint alone",
                    got=f"{module}.{name}",
                    hint="trust=True, or --trust, reads it all the same, which may run code",
                )
            )
        return found
