"""Checks of ``fastcheck selftest`` that compare records; each stops at its first difference.

A check takes a :class:`Subject` and returns a summary of what it did. It raises :class:`Fault` if
the device breaks a guarantee, and :class:`NotCheckable` if the device offers no means to find out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Optional

import numpy as np
import torch

from fastcheck.backends import npu
from fastcheck.backends.backend import Backend
from fastcheck.backends.table import backend_for
from fastcheck.kernels import kernels
from fastcheck.record.format import DEPTHS, DeviceMode, DTypeInfo
from fastcheck.statistics.functions import found_nonfinite, stats
from fastcheck.utils.torch.streams import DeviceStreams, streams_of

from .oracle import differences, format_of, oracle
from .tensors import Sample, copy_to, dtype_rows, layouts, special, values

__all__ = ["Fault", "NotCheckable", "Subject"]


class Fault(Exception):  # noqa: N818  (what a check found, not a mistake of its own)
    """The device or its backend gave a wrong result."""


class NotCheckable(Exception):  # noqa: N818  (not an error: this machine lacks the means)
    """The check needs something that is not here."""


@dataclass
class Subject:
    """The device under test. ``missing`` are dtypes that it does not have."""

    device: torch.device
    missing: list[str] = field(default_factory=list)

    @property
    def backend(self) -> Backend:
        return backend_for(self.device)

    @property
    def module(self) -> Any:
        """torch.cuda, torch.npu, ...; None for the CPU."""
        return None if self.device.type == "cpu" else getattr(torch, self.device.type)

    @property
    def streams(self) -> Optional[DeviceStreams]:
        return None if self.device.type == "cpu" else streams_of(self.device)

    @property
    def compares_with_kernels(self) -> bool:
        """Whether compiled kernels read the CPU, and are not themselves under test."""
        return self.device.type != "cpu" and kernels() is not None

    @property
    def exact_sums(self) -> bool:
        return self.compares_with_kernels and self.backend.determinism == "bitwise"

    def synchronize(self) -> None:
        if self.module is not None:
            self.module.synchronize(self.device)

    def expected(self, tensor: torch.Tensor, depth: str = "full", logical: bool = False) -> np.void:
        """The Record of a CPU tensor: the CPU kernels', else the oracle's."""
        if not self.compares_with_kernels:
            return oracle(tensor, DEPTHS[depth], logical)
        order = "logical" if logical else "storage"
        return stats(tensor, depth=depth, order=order).record

    def check(
        self, samples: Sequence[Sample], *, depth: str = "full", order: str = "storage"
    ) -> int:
        """Reads the samples on the device, in one call, and compares with the expected records."""
        there = [copy_to(sample.tensor, self.device) for sample in samples]
        records = stats(there, depth=depth, order=order).numpy()
        for sample, record in zip(samples, records):
            self.compare(record, sample, depth, order == "logical")
        return len(samples)

    def compare(
        self, record: np.void, sample: Sample, depth: str = "full", logical: bool = False
    ) -> None:
        want = self.expected(sample.tensor, depth, logical)
        found = differences(record, want, self.exact_sums)
        if found:
            note = "" if depth == "full" else f" at depth {depth}"
            raise Fault(f"{sample.what}{note}: {'; '.join(found)}")

    def rows(self) -> list[DTypeInfo]:
        """The dtypes that the device supports."""
        present = []
        for row in dtype_rows():
            try:
                copy_to(torch.zeros(2, dtype=getattr(torch, row.name)), self.device)
            except (RuntimeError, TypeError, NotImplementedError):
                if row.name not in self.missing:
                    self.missing.append(row.name)
            else:
                present.append(row)
        return present


def _counted(subject: Subject, tensors: int, dtypes: int) -> str:
    text = f"{tensors} tensors of {dtypes} dtypes"
    if subject.missing:
        text += f" (not on this device: {', '.join(subject.missing)})"
    return text


def check_values(subject: Subject) -> str:
    """every dtype, sizes around row and tile limits, at every depth, alone and in a list"""
    tensors = 0
    rows = subject.rows()
    for row in rows:
        samples = list(values(row))
        tensors += subject.check(samples)
        for depth in ("health", "stats"):
            tensors += subject.check(samples[-2:], depth=depth)
        last = samples[-1]
        subject.compare(stats(copy_to(last.tensor, subject.device)).record, last)
        tensors += 1
    return _counted(subject, tensors, len(rows))


def check_special(subject: Subject) -> str:
    """NaN payloads, infinities, subnormals, zeros of either sign, the largest finite value"""
    tensors = 0
    rows = [row for row in subject.rows() if format_of(row) is not None]
    for row in rows:
        tensors += subject.check(list(special(row)))
    return _counted(subject, tensors, len(rows))


def check_layouts(subject: Subject) -> str:
    """transposed, strided, offset, expanded and overlapping views, in storage and logical order"""
    tensors = 0
    rows = [row for row in subject.rows() if row.name in _OF_EACH_SIZE]
    for row in rows:
        samples = list(layouts(row))
        for order in ("storage", "logical"):
            tensors += subject.check(samples, order=order)
    return _counted(subject, tensors, len(rows))


#: One dtype for each size of an element, and for pairs.
_OF_EACH_SIZE = frozenset(
    {"float64", "float32", "bfloat16", "float8_e5m2", "complex64", "int8", "bool"}
)


def check_found_nonfinite(subject: Subject) -> str:
    """the flag that skips an update: 1.0 where any tensor of a list has a NaN or an infinity"""
    calls = 0
    saturates = subject.backend.device_mode is DeviceMode.SATURATING
    for row in subject.rows():
        if format_of(row) is None:
            continue
        healthy = [s for s in values(row) if "moderate" in s.what][-3:]
        _expect_found(subject, healthy, 0.0)
        for sample in special(row):
            record = subject.expected(sample.tensor, "health")
            names = ["nan", "posinf", "neginf"]
            if saturates and sample.tensor.dtype in npu.SATURABLE:
                names.append("saturated")
            bad = sum(int(record[f"{name}_count"]) for name in names)
            if "4098 times" in sample.what or " at 0 of" in sample.what:
                _expect_found(subject, [*healthy, sample], float(bad > 0))
                calls += 1
    return f"{calls} lists"


def _expect_found(subject: Subject, samples: Iterable[Sample], want: float) -> None:
    listed = list(samples)
    got = found_nonfinite([copy_to(sample.tensor, subject.device) for sample in listed]).item()
    if got != want:
        raise Fault(f"{listed[-1].what}: got {got}, expected {want}")


def check_kernels(subject: Subject) -> str:
    """every kernel that this CPU can run gives the same bits"""
    module: Any = kernels()
    if subject.device.type != "cpu" or module is None:
        raise NotCheckable("about the compiled kernels for the CPU")
    names = [name for name, usable, _ in module.cpu_isas() if usable]
    before = module.cpu_isa()
    samples = [s for row in dtype_rows() for s in (*values(row), *special(row))]

    def records(name: str) -> list[bytes]:
        module.set_cpu_isa(name)
        return [record.tobytes() for record in stats([s.tensor for s in samples]).numpy()]

    try:
        wanted = records("scalar")
        for name in names:
            for sample, got, want in zip(samples, records(name), wanted):
                if got != want:
                    raise Fault(f"{name} and scalar differ: {sample.what}")
    finally:
        module.set_cpu_isa(before)
    return f"{', '.join(names)}: {len(samples)} tensors"


def check_streams(subject: Subject) -> str:
    """records of tensors on several streams (CPU: threads) whose memory is used again at once"""
    samples = [s for row in dtype_rows() if row.name == "float32" for s in values(row)][-8:]
    if subject.device.type == "cpu":
        return _check_threads(subject, samples)
    streams = subject.streams
    if streams is None:
        raise NotCheckable(f"torch.{subject.device.type} has no streams and events")
    sources = [copy_to(sample.tensor, subject.device) for sample in samples]
    subject.synchronize()
    rounds, side = 12, [streams.new_stream() for _ in range(4)]
    made = []
    for i in range(rounds * len(side)):
        with streams.on(side[i % len(side)]):
            x = sources[i % len(sources)].clone()
            made.append((i % len(sources), stats(x)))
            del x  # its memory serves the next tensor of this stream, at once
            torch.full_like(sources[i % len(sources)], float("nan"))
    # Made on one stream, read on another that waits for it, and given back.
    for i, stream in enumerate(side):
        x = sources[i].clone()
        ready = streams.new_event()
        ready.record(streams.current())
        with streams.on(stream):
            stream.wait_event(ready)
            made.append((i, stats(x)))
            x.record_stream(stream)
        del x
    subject.synchronize()
    for which, record in made:
        subject.compare(record.record, samples[which])
    return f"{len(made)} tensors on {len(side)} streams"


def _check_threads(subject: Subject, samples: Sequence[Sample]) -> str:
    def read(_: int) -> int:
        for sample in samples:
            subject.compare(stats(sample.tensor).record, sample)
        return len(samples)

    with ThreadPoolExecutor(4) as pool:
        return f"{sum(pool.map(read, range(8)))} tensors in 4 threads"


def check_overflow_mode(subject: Subject) -> str:
    """how the device stores a result that is out of range, and that records have the same mode"""
    x = torch.full((130,), 65504.0, dtype=torch.float16).to(subject.device)
    over = x + x
    record = stats(over).record
    declared = DeviceMode(int(record["device_mode"]))
    expected = subject.backend.device_mode
    if declared != expected:
        raise Fault(f"records have {declared.name}, the backend {expected.name}")
    gone = stats(over - over).record
    if record["posinf_count"] == 130 and gone["nan_count"] == 130:
        seen = "infinities, and NaN of infinity minus infinity"
        behaves = DeviceMode.IEEE
    elif record["saturated_count"] == 130 and gone["zero_count"] == 130:
        seen = "the largest finite value, and zero of a difference of two"
        behaves = DeviceMode.SATURATING
    else:
        raise Fault(
            "float16 65504 + 65504 gives neither infinities nor the largest finite value: "
            f"{stats(over)!r}; their difference {stats(over - over)!r}"
        )
    text = f"records have {declared.name}; float16 65504 + 65504 gives {seen}"
    if declared not in (DeviceMode.UNKNOWN, behaves):
        raise Fault(text)
    return text


def title_of(check: Any) -> str:
    """The first paragraph of the check's docstring."""
    return " ".join((check.__doc__ or "").split("\n\n")[0].split())
