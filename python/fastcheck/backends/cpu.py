"""The backend of CPU tensors: the compiled kernels."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Callable

import torch

from fastcheck.record.exponents import EXPONENT_WORDS
from fastcheck.record.format import RECORD_BYTES, DeviceMode

from .backend import Backend, arguments_of

_HEALTH, _FULL = 1, 3


def cpu_backend(module: Any) -> Backend:
    """The backend of the kernels of ``module``, ``fastcheck._kernels``."""
    return Backend(
        name="cpu",
        determinism="bitwise",
        device_mode=DeviceMode.IEEE,
        observe=functools.partial(_observe, module),
        observe_list=functools.partial(_observe_list, module),
        found_nonfinite=functools.partial(_found_nonfinite, module),
        exponents=lambda tensor, logical: _words(
            module.exponents, [tensor], logical, EXPONENT_WORDS
        ),
        checksums=lambda tensors, logical: _words(module.checksums, tensors, logical, len(tensors)),
        observe_and_count=functools.partial(_observe_and_count, module),
    )


def _observe(
    module: Any, tensor: torch.Tensor, slots: torch.Tensor, index: int, depth: int
) -> None:
    _observe_list(module, [tensor], slots, index, depth)


def _observe_list(
    module: Any,
    tensors: Sequence[torch.Tensor],
    slots: torch.Tensor,
    first: int,
    depth: int,
    *,
    logical: bool = False,
) -> None:
    _read(module, tensors, depth, logical, slots[first : first + len(tensors)])


def _found_nonfinite(module: Any, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    records = torch.empty((len(tensors), RECORD_BYTES), dtype=torch.uint8, device="cpu")
    count = _read(module, tensors, _HEALTH, False, records)
    return torch.tensor(1.0 if count else 0.0, device="cpu")


def _words(
    read: Callable[..., Any], tensors: Sequence[torch.Tensor], logical: bool, count: int
) -> torch.Tensor:
    """The int64 (count,) that ``read`` makes of the tensors."""
    words = torch.empty(count, dtype=torch.int64, device="cpu")
    arguments, kept = arguments_of(tensors)
    read(arguments, logical, torch.get_num_threads(), words.data_ptr())
    del kept  # read by now
    return words


def _observe_and_count(
    module: Any, tensor: torch.Tensor, slots: torch.Tensor, index: int
) -> torch.Tensor:
    words = torch.empty(EXPONENT_WORDS, dtype=torch.int64, device="cpu")
    arguments, kept = arguments_of([tensor])
    slot = slots.data_ptr() + index * RECORD_BYTES
    threads = torch.get_num_threads()
    module.records_and_exponents(arguments, _FULL, False, threads, slot, words.data_ptr())
    del kept  # read by now
    return words


def _read(
    module: Any, tensors: Sequence[torch.Tensor], depth: int, logical: bool, rows: torch.Tensor
) -> int:
    """Writes whole records to ``rows``, uint8 (n, 192) without gaps; how many are non-finite."""
    arguments, kept = arguments_of(tensors)
    count: int = module.records(arguments, depth, logical, torch.get_num_threads(), rows.data_ptr())
    del kept  # read by now
    return count
