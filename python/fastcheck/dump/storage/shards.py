"""Writes tensors as safetensors files, by a thread, in bounded memory.

A safetensors file begins with a header of all that is in it, so room for the header is kept free
and filled in when the file is closed; until then its name ends in ``.part``. The format allows
spaces behind the header, and wants no gaps between tensors: a file takes elements of one size, so
that each lies where its type wants it. https://github.com/huggingface/safetensors (README, Format)
"""

from __future__ import annotations

import json
import os
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Optional

import torch

from fastcheck.statistics.functions import row_major_chunks
from fastcheck.utils.private import OwnDescriptor, new_file, write_all

#: Limit of the queued bytes; a dump takes these and the tensor that is being cloned.
MEMORY_BYTES = 256 * 1024 * 1024
# A larger tensor is written by the training thread, piece by piece, rather than cloned.
_LARGE_BYTES = 64 * 1024 * 1024
_SHARD_BYTES = 512 * 1024 * 1024
_HEADER_BYTES = 64 * 1024
# Bytes of an entry: its key, words and offsets, and each dimension.
_ENTRY_BYTES = 120
_DIMENSION_BYTES = 21

_BITS = (8, 16, 32, 64)
_NAMES = {
    **{f"{k}{n}": f"{k[0].upper()}{n}" for k in ("float", "int", "uint") for n in _BITS},
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "bool": "BOOL",
}
_COMPLEX = {torch.complex64: torch.float32, torch.complex128: torch.float64}


class Slot(NamedTuple):
    """The place of a tensor: the file's name, and its key there."""

    file: str
    key: str


class _Job(NamedTuple):
    file: str
    key: str
    dtype: str
    shape: Sequence[int]
    chunks: Iterable[torch.Tensor]
    size: int


def element_dtype(tensor: torch.Tensor) -> Optional[str]:
    """The format's name of the elements (of complex elements, of their parts); None: it has
    none.
    """
    dtype = _COMPLEX.get(tensor.dtype, tensor.dtype)
    return _NAMES.get(str(dtype).replace("torch.", ""))


class _ShardPlan:
    """The file for elements of one size, and how much of it is filled."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.bytes = 0
        self.header_bytes = 256

    def has_room(self, size: int, entry: int) -> bool:
        if self.header_bytes + entry > _HEADER_BYTES:
            return False
        return not self.bytes or self.bytes + size <= _SHARD_BYTES


class ShardWriter:
    """Writes the tensors of one dump. put() and close() are called by one thread at a time.

    After the first failure nothing more is written, and ``problem`` is its error; put() never
    raises for it."""

    def __init__(self, directory: str, memory_bytes: int = MEMORY_BYTES) -> None:
        self.problem: Optional[OSError] = None
        self.files: list[str] = []
        self.bytes_written = 0
        self._directory = directory
        self._memory_bytes = memory_bytes
        self._plans: dict[int, _ShardPlan] = {}
        self._count = 0
        self._open: dict[str, _Shard] = {}
        self._jobs: deque[_Job] = deque()
        self._waiting_bytes = 0
        self._is_busy = False
        self._is_closed = False
        self._changed = threading.Condition()
        self._thread: Optional[threading.Thread] = None

    def put(self, tensor: torch.Tensor) -> Optional[Slot]:
        """Writes ``tensor``, row-major, as it is now; a device tensor is copied to the host.

        Returns at once, unless what waits is more than the memory allows, or the tensor is large.
        None: its dtype has no name in the format, or writing has failed.
        """
        dtype = element_dtype(tensor)
        if dtype is None or self.problem is not None:
            return None
        shape = list(tensor.shape) + ([2] if tensor.is_complex() else [])
        size = tensor.numel() * tensor.element_size()
        entry = _ENTRY_BYTES + _DIMENSION_BYTES * len(shape)
        slot = self._plan(tensor.element_size() // (2 if tensor.is_complex() else 1), size, entry)
        is_large = size > min(_LARGE_BYTES, self._memory_bytes)
        if is_large:
            self._drain()
            self._write(_Job(slot.file, slot.key, dtype, shape, row_major_chunks(tensor), size))
            return slot
        with self._changed:
            while self._waiting_bytes + size > self._memory_bytes and self.problem is None:
                self._changed.wait()
        # A copy in any case: what is computed next may be in place.
        host = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        chunks = list(row_major_chunks(host))
        with self._changed:
            self._jobs.append(_Job(slot.file, slot.key, dtype, shape, chunks, size))
            self._waiting_bytes += size
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, name="fastcheck-dump", daemon=True
                )
                self._thread.start()
            self._changed.notify_all()
        return slot

    def close(self) -> None:
        """Waits until all is written, and completes the files. Idempotent."""
        self._drain()
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        for name in list(self._open):
            self._finish(name)

    def _plan(self, element_bytes: int, size: int, entry: int) -> Slot:
        with self._changed:
            plan = self._plans.get(element_bytes)
            if plan is None or not plan.has_room(size, entry):
                plan = _ShardPlan(f"tensors-{len(self.files):05d}.safetensors")
                self._plans[element_bytes] = plan
                self.files.append(plan.file)
            plan.bytes += size
            plan.header_bytes += entry
            self._count += 1
            return Slot(plan.file, str(self._count - 1))

    def _drain(self) -> None:
        with self._changed:
            while (self._jobs or self._is_busy) and self.problem is None:
                self._changed.wait()

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._jobs and not self._is_closed:
                    self._changed.wait()
                if not self._jobs:
                    return
                job = self._jobs.popleft()
                self._is_busy = True
            self._write(job)
            with self._changed:
                self._waiting_bytes -= job.size
                self._is_busy = False
                self._changed.notify_all()

    def _write(self, job: _Job) -> None:
        if self.problem is not None:
            return
        path = os.path.join(self._directory, job.file)
        try:
            shard = self._open.get(job.file)
            if shard is None:
                # Files are filled one after the other: of each size of element one file is open.
                shard = self._open[job.file] = _Shard(path)
            shard.add(job)
            self.bytes_written += job.size
            for name in [name for name in self._open if self._is_full(name)]:
                self._finish(name)
        except Exception as error:
            self._fail(error, path)

    def _is_full(self, name: str) -> bool:
        """True if no plan writes there any longer, and all that was to go there is there."""
        with self._changed:
            is_planned = any(plan.file == name for plan in self._plans.values())
            return not is_planned and all(job.file != name for job in self._jobs)

    def _finish(self, name: str) -> None:
        shard = self._open.pop(name)
        try:
            shard.close()
        except Exception as error:
            self._fail(error, shard.path)

    def _fail(self, error: Exception, path: str) -> None:
        problem = error if isinstance(error, OSError) else OSError(0, f"{error}")
        problem.filename = path
        with self._changed:
            self.problem = self.problem or problem
            self._jobs.clear()
            self._waiting_bytes = 0
            self._changed.notify_all()


class _Shard:
    def __init__(self, path: str) -> None:
        self.path = path
        self._part = f"{path}.part"
        self._descriptor = OwnDescriptor(new_file(self._part), self._part)
        self._entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        self._end = 0
        os.lseek(self._descriptor.number(), 8 + _HEADER_BYTES, os.SEEK_SET)

    def add(self, job: _Job) -> None:
        begin = self._end
        for chunk in job.chunks:
            write_all(self._descriptor.number(), chunk.numpy())
            self._end += chunk.numel()
        self._entries[job.key] = {
            "dtype": job.dtype,
            "shape": list(job.shape),
            "data_offsets": [begin, self._end],
        }

    def close(self) -> None:
        header = json.dumps(self._entries, separators=(",", ":")).encode()
        assert len(header) <= _HEADER_BYTES
        room = header.ljust(_HEADER_BYTES)
        try:
            os.lseek(self._descriptor.number(), 0, os.SEEK_SET)
            write_all(self._descriptor.number(), len(room).to_bytes(8, "little") + room)
        finally:
            self._descriptor.close()
        os.replace(self._part, self.path)
