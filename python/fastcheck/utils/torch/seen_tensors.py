"""Remembers which tensors were read in this step: the extension's SeenTensors
(csrc/torch/read/seen_tensors.h), or the same in Python where there is no extension.
"""

from __future__ import annotations

import torch

from fastcheck.extension import compiled

from .memory_ref import WeakStorage, storage_of
from .readable import is_dense


def make_seen() -> SeenTensors:
    """An empty table. ConfigError as :func:`fastcheck.extension.compiled`."""
    module = compiled()
    if module is None:
        return SeenTensors()
    return module.SeenTensors()


class SeenTensors:
    """A set of tensors. Two are equal when they show the same bytes of the same storage at the same
    version.

    Storages are held weakly: their memory may be freed, but the identity of a storage (the address
    of its StorageImpl) is given to no other while it is remembered here, so a reused address is
    never taken for the earlier storage.
    """

    def __init__(self) -> None:
        self._seqs: dict[tuple[object, ...], int] = {}
        self._storages: dict[int, WeakStorage] = {}

    def add(self, tensor: torch.Tensor, seq: int) -> int:
        """Returns -1 for a new tensor, which is remembered under ``seq``; for another the seq that
        it was first seen with. A tensor without a storage or without a version counter (inference
        mode) is always new and never remembered. Does not synchronise.
        """
        storage = None if tensor.is_inference() else storage_of(tensor)
        if storage is None:
            return -1
        identity = int(storage._cdata)
        kind = tensor.dtype, tensor.is_conj(), tensor.is_neg()
        # Where it is dense, neither sizes nor strides change which bytes are shown.
        geometry = None if is_dense(tensor) else (tuple(tensor.shape), tensor.stride())
        place = identity, tensor.storage_offset(), tensor.numel(), geometry
        key = place, tensor._version, kind
        first_seq = self._seqs.get(key)
        if first_seq is not None:
            return first_seq
        if identity not in self._storages:
            self._storages[identity] = WeakStorage(storage)
        self._seqs[key] = seq
        return -1

    def clear(self) -> None:
        self._seqs.clear()
        self._storages.clear()

    def __len__(self) -> int:
        return len(self._seqs)
