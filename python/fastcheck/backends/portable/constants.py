"""Small tensors that the portable backend caches on each device, and the copies to it.

A constant is copied once, waiting for the copy, so that it may then be read on any stream. What
depends on the sizes of a list is copied without waiting, and is kept per stream for that reason.
"""

from __future__ import annotations

import functools
from typing import Any, Callable

import torch

from fastcheck.utils.torch.streams import stream_handle


def _kept(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """functools.cache, but with one result per key for ever.

    In functools.cache, when two threads compute the same key at once, the second result replaces
    the first, whose memory is then freed while a stream may still have to read it.
    """
    kept: dict[tuple[Any, ...], torch.Tensor] = {}

    @functools.wraps(make)
    def get(*key: Any) -> torch.Tensor:
        tensor = kept.get(key)
        return kept.setdefault(key, make(*key)) if tensor is None else tensor

    get.cache_clear = kept.clear  # type: ignore[attr-defined]  # as functools.cache has it
    return get


@_kept
def constant(values: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """``values`` (a number or nested tuples) on ``device``: never written to, never freed."""
    return torch.tensor(values, dtype=dtype, device="cpu").to(device)


@_kept
def zeros(count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.zeros(count, dtype=dtype, device="cpu").to(device)


@_kept
def counting(count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """0, 1, ..., count - 1."""
    return torch.arange(count, dtype=dtype, device="cpu").to(device)


def upload(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on ``device``, ready in the order of its current stream; the host doesn't wait where
    the device takes pinned memory.
    """
    if device.type == "cpu":
        return host
    try:
        pinned = host.pin_memory()
    except (RuntimeError, NotImplementedError):  # older torch pins for CUDA alone
        return host.to(device)
    return pinned.to(device, non_blocking=True)


def stream_key(device: torch.device) -> int:
    """A number of the device's current stream; 0 where the device has no streams."""
    module = getattr(torch, device.type, None)
    current = getattr(module, "current_stream", None)
    if device.type == "cpu" or current is None:
        return 0
    stream = current(device)
    # Streams that a device's own package made up have no number of torch's.
    number = getattr(stream, "stream_id", None)
    return stream_handle(stream) if number is None else int(number)
