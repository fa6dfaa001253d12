"""Launches of the Triton kernels for one tensor: words, chunks, grids, and the sizes of a target.

Dense memory is read in place, as it lies; everything else, and memory that no 32-bit word starts
at, is copied a chunk at a time, as the portable backend does. Nothing here waits for the device.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fastcheck.backends.portable import checksum as sum64
from fastcheck.backends.portable.formats import FORMATS, TILE, Format
from fastcheck.backends.portable.traversal import Traversal, traverse
from fastcheck.record.format import Depth
from fastcheck.utils.torch.own_operators import no_grad

from . import kernels

#: The most bytes of a launch's words: 2^30 components, and byte offsets that fit 32 bits.
CHUNK_BYTES = 1 << 30
#: The most bytes that are copied before they are read.
COPIED_BYTES = 1 << 24

_MANTISSA = {"float32": 23, "float16": 10, "bfloat16": 7}


@dataclass(frozen=True)
class Target:
    """``lanes``: words that a program reads side by side, a power of two from 64 on. ``programs``:
    most of a launch. ``alone``: steps up to which one program reads it all and writes the slot.
    ``block``: rows of partials that the fold reads side by side. ``takes_lists``: whether a kernel
    may follow addresses that it reads.
    """

    programs: int
    lanes: int
    alone: int = 1
    block: int = 256
    options: Mapping[str, Any] = field(default_factory=dict)
    takes_lists: bool = True


@functools.cache
def target_of(device: torch.device) -> Target:
    """The sizes for a device's vector units. Those of GPUs come from compiled code; none was
    timed.
    """
    is_interpreted = type(kernels.whole_kernel).__name__ == "InterpretedFunction"
    if device.type != "cpu" and is_interpreted:
        # The interpreter gives kernels copies on the host, to which no address points.
        return dataclasses.replace(_target_of(device), takes_lists=False)
    return _target_of(device)


def _target_of(device: torch.device) -> Target:
    if device.type == "npu":
        # The smaller chips have 40 vector cores; the unified buffer is 192 KiB.
        return Target(programs=40, lanes=512, alone=4)
    if device.type == "mlu":
        return Target(programs=64, lanes=512, alone=4)
    module = getattr(torch, device.type, None)
    properties = getattr(module, "get_device_properties", None)
    count = getattr(properties(device), "multi_processor_count", 64) if properties else 64
    return Target(programs=8 * int(count), lanes=256, options={"num_warps": 4})


def reads(dtype: torch.dtype) -> bool:
    """True if there are kernels for tensors of ``dtype``; others are the portable backend's."""
    info = FORMATS[dtype].info
    return info.components == 1 and (info.kind != "f8" or info.name in _MANTISSA)


def launch_record(
    tensor: torch.Tensor,
    slots: torch.Tensor,
    index: int,
    depth: int,
    target: Target,
    *,
    logical: bool = False,
    chunk_bytes: int = CHUNK_BYTES,
    copied_bytes: int = COPIED_BYTES,
) -> None:
    """Launches kernels that write bytes [0, 112) of ``slots[index]``, uint8 (n, 192) on the
    tensor's device. The tensor is readable, and of a dtype that :func:`reads` names. No
    synchronisation. ``chunk_bytes`` and ``copied_bytes`` are powers of two from 8 * 4096 on.
    """
    with no_grad(), torch._C.DisableTorchFunctionSubclass(), on(tensor.device):
        x = traverse(tensor, logical)
        slot = slots[index].view(torch.int32)
        numel = tensor.numel()
        lengths = sum64.length_terms(numel * x.format.info.component_bytes)
        numbers = (*_halves(numel), *map(sum64.signed, lengths))
        reader = Reader(x.format, int(depth), target)
        is_copied = not x.is_flat or x.flips is not None or not _is_aligned(x.bits)
        size = (copied_bytes if is_copied else chunk_bytes) // x.format.info.component_bytes
        if x.components <= size and reader.steps(x.components) <= target.alone:
            reader.whole(_aligned(x.whole()), slot, numbers)
            return
        _in_parts(x, reader, size, slot, numbers)


def _in_parts(
    x: Traversal, reader: Reader, size: int, slot: torch.Tensor, numbers: tuple[int, ...]
) -> None:
    full, rest = divmod(x.components, size)
    rows = full * reader.programs(size) + (reader.programs(rest) if rest else 0)
    partials = torch.empty((kernels.COLUMNS, rows), dtype=torch.int32, device=slot.device)
    row = 0
    chains = 0
    for chunk, _ in x.chunks(size, unit=0):
        row += reader.part(_aligned(chunk), partials, row, chains)
        chains += size // TILE * 4 * reader.width
    reader.fold(partials, slot, numbers)


class Reader:
    """The launches of one tensor: what they have in common."""

    def __init__(self, form: Format, depth: int, target: Target) -> None:
        info = form.info
        self.size = info.component_bytes
        #: Words in a row of 64 components.
        self.width = sum64.row_words(self.size)
        self.target = target
        if info.kind == "f8":
            kind = kernels.FLOAT
        elif info.name == "bool":
            kind = kernels.BOOL
        else:
            kind = kernels.SIGNED if info.kind == "i8" else kernels.UNSIGNED
        #: The arguments that all launches are given by name.
        self.options: dict[str, Any] = {
            "SIZE": self.size,
            "KIND": kind.value,
            "MANTISSA": _MANTISSA.get(info.name, 0),
            "DEPTH": int(Depth(depth)),
            **target.options,
        }
        self.groups = max(1, target.lanes // min(self.width, 64))

    def steps(self, components: int) -> int:
        return -(-self._words(components) // (self.groups * 16 * self.width))

    def programs(self, components: int) -> int:
        return min(self.steps(components), self.target.programs)

    def layout(self, components: int) -> tuple[int, int, int]:
        """Whole words, components behind them, rows of the longest chain."""
        body = components * self.size // 4
        rows = sum64.rows_of(self._words(components), self.width)
        return body, components - body * 4 // self.size, rows

    def whole(self, chunk: torch.Tensor, slot: torch.Tensor, numbers: tuple[int, ...]) -> None:
        words, tail, sizes = self._arguments(chunk, 0, slot)
        given = (words, tail, slot, *sizes, *numbers)
        kernels.whole_kernel[(1,)](*given, GROUPS=self.groups, **self.options)

    def part(self, chunk: torch.Tensor, partials: torch.Tensor, row: int, chains: int) -> int:
        """Fills a row for each program; returns their number."""
        words, tail, sizes = self._arguments(chunk, chains, partials)
        programs = self.programs(chunk.numel())
        given = (words, tail, partials, partials.shape[1], row, *sizes)
        kernels.part_kernel[(programs,)](*given, GROUPS=self.groups, **self.options)
        return programs

    def fold(self, partials: torch.Tensor, slot: torch.Tensor, numbers: tuple[int, ...]) -> None:
        given = (partials, slot, partials.shape[1], partials.shape[1], *numbers)
        kernels.fold_kernel[(1,)](*given, BLOCK=self.target.block, **self.options)

    def _words(self, components: int) -> int:
        return -(-components * self.size // 4)

    def _arguments(
        self, chunk: torch.Tensor, chains: int, other: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]:
        """Whole words, the components behind them, and sizes as the kernels name them. In the place
        of what is empty, and has no address, stands ``other``, any int32: to be there, not to be
        read from.
        """
        components = chunk.numel()
        body, tail_count, rows = self.layout(components)
        whole = components - tail_count
        words = chunk[:whole].view(torch.int32) if body else other
        tail = chunk[whole:] if tail_count else other.view(-1).view(chunk.dtype)
        return words, tail, (body, tail_count, components, *sum64.seeds(chains), rows)


def _halves(value: int) -> tuple[int, int]:
    """The two halves of a 64-bit integer, as int32."""
    return sum64.signed(value), sum64.signed(value >> 32)


def _is_aligned(bits: torch.Tensor) -> bool:
    """True if a word starts there, in memory and as torch's views count."""
    return bits.data_ptr() % 4 == 0 and bits.storage_offset() * bits.element_size() % 4 == 0


def _aligned(chunk: torch.Tensor) -> torch.Tensor:
    return chunk if _is_aligned(chunk) else chunk.clone()


def on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device."""
    module: Any = getattr(torch, device.type)
    if device.type == "cpu" or device.index in (None, module.current_device()):
        return contextlib.nullcontext()
    return module.device(device)
