"""Tracks memory that was allocated and not written yet, whose contents differ between runs."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["FreshMemory"]

# Weak references to storages have no public form; torch.multiprocessing.reductions uses these.
_STORAGE: Any = torch.UntypedStorage


class FreshMemory:
    """Storages by the address of their StorageImpl, which is held weakly: no other gets it."""

    def __init__(self) -> None:
        # Bytes that were not written yet, by storage.
        self._left: dict[int, int] = {}
        self._references: dict[int, int] = {}

    def add(self, tensor: torch.Tensor) -> None:
        """``tensor`` was allocated."""
        storage = _storage_of(tensor)
        if storage is None or not storage.nbytes():
            return
        key = int(storage._cdata)
        self._left[key] = storage.nbytes()
        if key not in self._references:
            self._references[key] = storage._weak_ref()

    def is_fresh(self, tensor: torch.Tensor) -> bool:
        """Whether a part of the tensor's storage may be uninitialised."""
        if not self._left:
            return False
        storage = _storage_of(tensor)
        return storage is not None and int(storage._cdata) in self._left

    def wrote(self, tensor: torch.Tensor, is_overwriting: bool) -> None:
        """An op has written to the tensor: over all of it, or somewhere in it."""
        if not self._left:
            return
        storage = _storage_of(tensor)
        key = -1 if storage is None else int(storage._cdata)
        if key not in self._left:
            return
        if is_overwriting:
            self._left[key] -= tensor.numel() * tensor.element_size()
        # A partial write is taken as intentional: the storage no longer counts as uninitialised.
        if not is_overwriting or self._left[key] <= 0:
            del self._left[key]

    def clear(self) -> None:
        self._left.clear()
        while self._references:
            _STORAGE._free_weak_ref(self._references.popitem()[1])


def _storage_of(tensor: torch.Tensor) -> Any:
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # sparse, nested, wrapped: no storage
        return None
