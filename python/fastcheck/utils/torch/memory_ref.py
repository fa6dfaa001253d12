"""MemoryRef: knows the memory of a tensor again, and keeps neither alive; what is read of sparse
tensors, nested tensors and DTensors.
"""

from __future__ import annotations

import functools
from typing import Any, Callable

import torch

from fastcheck.extension import status

from .own_operators import no_grad, unobserved
from .sharding import local

_COMPRESSED = frozenset((torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc))


def name_of_held(tensor: torch.Tensor) -> str:
    """The attribute that has what held_by() finds: of most tensors none."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return ".values"
    return ".local" if hasattr(tensor, "_local_tensor") else ""


def held_by(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that is read of this one, on its memory and without a graph: the values of a
    sparse or nested tensor, what this rank has of a DTensor; any other as it is, and nested tensors
    with gaps.
    """
    is_coo = tensor.layout is torch.sparse_coo
    if tensor.is_nested:
        # The lengths of rows that are shorter than what a jagged tensor holds of them.
        lengths: Any = getattr(tensor, "_lengths", None)
        if lengths is not None or (tensor.layout is torch.strided and not tensor.is_contiguous()):
            return tensor
    elif not is_coo and tensor.layout not in _COMPRESSED:
        return local(tensor)
    with unobserved(), no_grad():
        held = tensor._values() if is_coo else tensor.values()
        return held.detach()


# Weak references to storages have no public form; torch.multiprocessing.reductions uses these.
_STORAGE: Any = torch.UntypedStorage


def storage_of(tensor: torch.Tensor) -> Any:
    """The storage of a tensor; None where it is sparse, nested or wrapped by a transform."""
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None


class WeakStorage:
    """A weak reference to a storage, or to none: no other storage gets its address meanwhile."""

    __slots__ = ("_free", "address")

    def __init__(self, storage: Any) -> None:
        # The address of the StorageImpl; 0: there is none, or an interrupt came first.
        self.address: int = 0
        # The module may be gone before this object is, at the interpreter's end.
        self._free = _STORAGE._free_weak_ref
        if storage is not None:
            self.address = storage._weak_ref()

    def __del__(self) -> None:
        if self.address:
            self._free(self.address)


class MemoryRef:
    """A weak reference to the storage of a tensor. While it is there no other storage gets the
    same address.

    A reference to the tensor itself would have ``torch.utils.swap_tensors()`` refuse the tensor,
    and with it the conversion of a module.
    """

    __slots__ = ("_offset", "_storage")

    def __init__(self, tensor: torch.Tensor) -> None:
        storage, self._offset = _memory_of(tensor)
        self._storage = WeakStorage(storage)

    def is_of(self, tensor: torch.Tensor) -> bool:
        """True if ``tensor`` has the same memory; False where it has none."""
        return self.is_at(tensor, self._storage.address, self._offset)

    @staticmethod
    def is_at(tensor: torch.Tensor, address: int, offset: int) -> bool:
        """True if this is where the memory of ``tensor`` begins."""
        storage, begin = _memory_of(tensor)
        return storage is not None and (storage._cdata, begin) == (address, offset)


#: Makes a MemoryRef: in C++ of an ordinary tensor (csrc/torch/hooks/stored.h).
memory_ref: Callable[[torch.Tensor], MemoryRef]
memory_ref = (
    MemoryRef if status.module is None else functools.partial(status.module.memory_ref, MemoryRef)
)


def _memory_of(tensor: torch.Tensor) -> tuple[Any, int]:
    """The storage, and where the tensor begins in it."""
    tensor = held_by(local(tensor))
    storage = storage_of(tensor)
    return storage, 0 if storage is None else int(tensor.storage_offset())
