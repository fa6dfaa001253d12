"""The checks of ``fastcheck doctor --device``: records, no wait of the host, and ``install()``, on
tensors whose bits come from a formula, the same on every machine.

A check takes the device and returns what it did. It raises :class:`Fault` if the device breaks a
guarantee, and :class:`NotCheckable` if the device offers no means to find out.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Callable, NamedTuple

import numpy as np
import torch
from torch import nn

from fastcheck.backends.complete_records import record_list
from fastcheck.backends.portable.formats import FORMATS, MANTISSA_BITS, Format
from fastcheck.backends.table import backend_for
from fastcheck.errors import ConfigError, first_line
from fastcheck.kernels import kernels
from fastcheck.monitor.install import install
from fastcheck.record.format import DEPTHS, DTYPES, RECORD_DTYPE, VALUE_BYTES, offset_of
from fastcheck.record.statistics import FLOAT_FORMATS
from fastcheck.report.error import OverflowDetected
from fastcheck.statistics.functions import found_nonfinite, stats
from fastcheck.utils.torch.streams import streams_of

PASSED, FAILED, NOT_CHECKABLE = "passed", "FAILED", "not checkable here"

_SUMS = ("sum", "abs_sum", "sum_sq")
_TOLERANCE = 1e-6
_NAN_BITS = 0x7FC00000

#: Around the ends of a row of 64, of a run, of a tile of 4096, and of several tiles.
_SIZES = (0, 1, 63, 65, 1023, 1025, 4095, 4096, 4097, 3 * 4096 + 1000)

#: Packages that register a device type that torch alone does not have.
_PLUGINS = {"npu": "torch_npu", "mlu": "torch_mlu"}


def find_device(name: str) -> torch.device:
    """The device of this name, as ``"cuda"`` or ``"npu:1"``, with its index.

    Raises ConfigError where torch can put no tensor there and fetch it.
    """
    kind = name.partition(":")[0]
    try:
        if kind in _PLUGINS and not hasattr(torch, kind):
            importlib.import_module(_PLUGINS[kind])
        there = torch.zeros(1, device=name)
        there.cpu()
    except Exception as error:  # of a driver, a library or torch
        raise ConfigError(f"device {name!r} can't be tested here: {first_line(error)}") from error
    return there.device


class Sample(NamedTuple):
    what: str
    tensor: torch.Tensor  # on the CPU


def sizes(form: Format) -> Iterator[Sample]:
    """Sizes around every limit: of any bits, and of moderate finite values."""
    for count in _SIZES:
        components = count + count % form.info.components
        yield _sample(form, _any_bits(form, components), f"{count} components of any bits")
        if form.is_float:
            yield _sample(form, _moderate(form, components), f"{count} components of moderate size")


def special(form: Format) -> Iterator[Sample]:
    """Samples that a comparison, a conversion or flushed subnormals would get wrong; none for
    integers, where every bit pattern is a value like others.
    """
    if not form.is_float:
        return
    base = _moderate(form, 2 * 4096 + 66)
    patterns = _special_bits(form)
    for name, bits in patterns.items():
        changed = base.copy()
        changed[[0, 4096 + 4095, -1]] = bits
        yield _sample(form, changed, f"{name} at 0, 8191 and 8257 of 8258")
        yield _sample(form, np.full(4098, bits, base.dtype), f"4098 times {name}")
    mixed = np.tile(np.array(list(patterns.values()), base.dtype), 1000)
    yield _sample(form, mixed, "all special values by turns")
    if _exponent_bits(form) >= 8:
        # Magnitudes on either side of where a tile is added up scaled: squares that overflow or
        # vanish.
        for exponent in (-100, -41, -39, 59, 61, 100):
            about = _about(form, 4166, exponent)
            yield _sample(form, about, f"4166 components about 2^{exponent}")


def layouts(form: Format) -> Iterator[Sample]:
    """Views of other strides, offsets and alignments."""
    flat = _sample(form, _any_bits(form, 12000 * form.info.components), "").tensor
    views: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "transposed": lambda x: x[:2100].view(30, 70).t(),
        "channels last": lambda x: x[:3360].view(2, 7, 12, 20).permute(0, 3, 1, 2),
        "from the second element on": lambda x: x[1:],
        "every third": lambda x: x[1::3],
        "columns": lambda x: x[: 90 * 96].view(90, 96)[:, 1:40],
        "expanded": lambda x: x[:129].view(3, 1, 43).expand(3, 50, 43),
        "no dimensions": lambda x: x[7],
        "a diagonal": lambda x: x[: 90 * 90].view(90, 90).diagonal(),
        "overlapping windows": lambda x: x[:500].unfold(0, 32, 3),
    }
    for name, view in views.items():
        yield Sample(f"{form.info.name}, {name}", view(flat))


def copy_to(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on ``device``, bytes, strides and offset as they are."""
    storage = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).to(device)
    return storage.view(tensor.dtype).as_strided(
        tensor.shape, tensor.stride(), tensor.storage_offset()
    )


def _any_bits(form: Format, components: int) -> np.ndarray:
    """Components as unsigned integers: the same on every machine, any bit pattern among them."""
    size = form.info.component_bytes
    return np.frombuffer(np.random.default_rng(1).bytes(size * components), f"<u{size}")


def _about(form: Format, components: int, exponent: int) -> np.ndarray:
    """Random signs and mantissas, with binary exponents from ``exponent`` to 15 above it."""
    bits, mantissa = _any_bits(form, components), MANTISSA_BITS[form.info.name]
    biased = (1 << (_exponent_bits(form) - 1)) - 1 + exponent
    exponents = np.random.default_rng(2).integers(biased, biased + 16, components)
    kept = bits & bits.dtype.type(1 << (8 * bits.itemsize - 1) | (1 << mantissa) - 1)
    return kept | exponents.astype(bits.dtype) << bits.dtype.type(mantissa)


def _moderate(form: Format, components: int) -> np.ndarray:
    return _about(form, components, -4 if _exponent_bits(form) > 4 else -7)


def _exponent_bits(form: Format) -> int:
    return 8 * form.info.component_bytes - 1 - MANTISSA_BITS[form.info.name]


def _special_bits(form: Format) -> dict[str, int]:
    """Bit patterns of special numbers by name; those of either sign with the sign in the name."""
    sign, normal = 1 << (8 * form.info.component_bytes - 1), 1 << MANTISSA_BITS[form.info.name]
    largest = form.largest
    patterns = {
        "zero": 0,
        "smallest subnormal": 1,
        "largest subnormal": normal - 1,
        "smallest normal": normal,
        "largest finite": largest,
        "NaN, all bits": sign - 1,
    }
    if FLOAT_FORMATS[form.info.name].has_inf:
        patterns["infinity"] = largest + 1
        patterns["signaling NaN"] = largest + 2
        patterns["quiet NaN"] = largest + 1 | normal >> 1
    return {**patterns, **{f"-({name})": bits | sign for name, bits in patterns.items()}}


def _sample(form: Format, bits: np.ndarray, what: str) -> Sample:
    raw = bits & 1 if form.info.name == "bool" else bits  # other bytes are no value of torch's
    dtype = getattr(torch, form.info.name)
    tensor = torch.frombuffer(bytearray(raw), dtype=dtype) if raw.size else torch.empty(0).to(dtype)
    return Sample(f"{form.info.name}, {what}", tensor)


class Fault(Exception):  # noqa: N818  (what a check found, not a mistake of its own)
    """The device or its backend gave a wrong result."""


class NotCheckable(Exception):  # noqa: N818  (not an error: this machine lacks the means)
    """The check needs something that is not here."""


@dataclass(frozen=True)
class CheckResult:
    """A check: its name; PASSED, FAILED or NOT_CHECKABLE; and what it did or found."""

    name: str
    status: str
    detail: str
    seconds: float


def run_checks(device: torch.device) -> Iterator[CheckResult]:
    """Runs every check and yields each as it is done. A check that raises anything has failed; the
    others still run.
    """
    for name, check in CHECKS.items():
        began = time.perf_counter()
        try:
            status, detail = PASSED, check(device)
        except NotCheckable as reason:
            status, detail = NOT_CHECKABLE, str(reason)
        except Fault as fault:
            status, detail = FAILED, str(fault)
        except Exception as error:  # whatever a backend raises is what this is to find out
            status, detail = FAILED, _error_text(error)
        yield CheckResult(name, status, detail, time.perf_counter() - began)


def _error_text(error: Exception) -> str:
    """An error in one line, and where it came from, without this machine's paths."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    file = frame.filename.replace("\\", "/").rsplit("/", 1)[-1]
    text = " ".join(str(error).split())
    return f"{type(error).__name__} in {file}:{frame.lineno}: {text[:400]}"


# ---- records ------------------------------------------------------------------------------------


def check_values(device: torch.device) -> str:
    """Every dtype, sizes around row and tile limits, special values and strides, with every
    ``record=``, in either order, alone and in a list, against the CPU's kernels; on the CPU against
    the scalar kernel, the plainest of them.
    """
    module: Any = kernels()
    if device.type == "cpu" and (module is None or module.cpu_isa() == "scalar"):
        raise NotCheckable("nothing else here reads the CPU's tensors, to compare this with")
    rows, missing, tensors = 0, [], 0
    for form in FORMATS.values():
        try:
            copy_to(torch.zeros(2).to(getattr(torch, form.info.name)), device)
        except (RuntimeError, TypeError, NotImplementedError):
            missing.append(form.info.name)
            continue
        rows += 1
        dense, views = [*sizes(form), *special(form)], list(layouts(form))
        tensors += _check_list(device, dense + views)
        tensors += _check_list(device, views, order="logical")
        for kind in ("health", "stats"):
            tensors += _check_list(device, dense[-2:], record=kind)
        alone = stats(copy_to(dense[-1].tensor, device)).record
        (want,) = _expected(device, dense[-1:], "full", "storage")
        _compare(device, alone, want, dense[-1].what)
    text = f"{tensors + rows} tensors of {rows} dtypes"
    return text + (f" (not on this device: {', '.join(missing)})" if missing else "")


def _check_list(
    device: torch.device, samples: Sequence[Sample], *, record: str = "full", order: str = "storage"
) -> int:
    """Reads the samples on the device, in one call."""
    there = [copy_to(sample.tensor, device) for sample in samples]
    made = stats(there, record=record, order=order).numpy()
    for sample, got, want in zip(samples, made, _expected(device, samples, record, order)):
        _compare(device, got, want, f"{sample.what}, record={record!r}, order={order!r}")
    return len(samples)


def _expected(
    device: torch.device, samples: Sequence[Sample], record: str, order: str
) -> np.ndarray:
    """The records that these are compared with."""
    tensors = [sample.tensor for sample in samples]
    with _scalar_kernel() if device.type == "cpu" else contextlib.nullcontext():
        rows = record_list(tensors, int(DEPTHS[record]), order == "logical")
    records: np.ndarray = np.frombuffer(rows.numpy().tobytes(), RECORD_DTYPE).copy()
    records["device_mode"] = int(backend_for(device).device_mode)
    return records


@contextlib.contextmanager
def _scalar_kernel() -> Iterator[None]:
    module: Any = kernels()
    before = module.cpu_isa()
    module.set_cpu_isa("scalar")
    try:
        yield
    finally:
        module.set_cpu_isa(before)


def _compare(device: torch.device, got: np.void, want: np.void, what: str) -> None:
    """Byte for byte; sums within 1e-6 where a backend guarantees no more."""
    readers = backend_for(device), backend_for(torch.device("cpu"))
    are_exact = all(reader.determinism == "bitwise" for reader in readers)
    differences = []
    for name in RECORD_DTYPE.names or ():
        is_compared = name in ("dtype", "order", "depth", "device_mode")
        if offset_of(name) >= VALUE_BYTES and not is_compared:
            continue
        if got[name].tobytes() == want[name].tobytes():
            continue
        if name in _SUMS and not are_exact and _is_close(name, got, want):
            continue
        differences.append(f"{name}: got {_shown(got, name)}, expected {_shown(want, name)}")
    if differences:
        raise Fault(f"{what}: {'; '.join(differences)}")


def _is_close(name: str, got: np.void, want: np.void) -> bool:
    value, wanted = float(got[name]), float(want[name])
    if name == "sum_sq":
        return math.isclose(value, wanted, rel_tol=_TOLERANCE)
    # One order of adding up makes an infinity where another makes a NaN, if sums overflow.
    abs_sum = float(want["abs_sum"])
    return math.isinf(abs_sum) or abs(value - wanted) <= _TOLERANCE * abs_sum


def _shown(record: np.void, name: str) -> str:
    """A field as a person reads it, in the type that the record's dtype gives it."""
    if name in ("min", "max"):
        kind = DTYPES[int(record["dtype"])].kind
        return repr(np.frombuffer(record[name].tobytes(), f"<{kind}")[0].item())
    return f"{int(record[name]):016x}" if name == "checksum" else repr(record[name].item())


# ---- no wait ------------------------------------------------------------------------------------


def check_no_wait(device: torch.device) -> str:
    """The host is not made to wait: by the device's own watch for it, and behind a busy stream."""
    if device.type == "cpu":
        raise NotCheckable("the CPU computes in the caller's thread: there is nothing to wait for")
    streams, module = streams_of(device), getattr(torch, device.type)
    if streams is None:
        raise NotCheckable(f"torch.{device.type} has no streams and events")
    tensors = [torch.full((n,), 1.5, device=device) for n in (70, 5000, 100_000)]

    def observe() -> None:
        stats(tensors)
        stats(tensors[1], record="health")
        found_nonfinite(tensors)

    observe()  # the first time copies constants there
    module.synchronize(device)
    watched = f"torch.{device.type} has no watch for waits"
    has_watch = hasattr(module, "set_sync_debug_mode")
    if has_watch:
        before = getattr(module, "get_sync_debug_mode", lambda: "default")()
        module.set_sync_debug_mode("error")
        try:
            observe()
        except RuntimeError as error:
            raise Fault(f'under set_sync_debug_mode("error"): {first_line(error)}') from error
        finally:
            module.set_sync_debug_mode(before)
        watched = 'set_sync_debug_mode("error") raised nothing'
    module.synchronize(device)
    was_late = False
    for seconds in (0.5, 1, 2):  # a busy host may be late once
        done = streams.new_event()
        _enqueue_work(device, module.synchronize, seconds)
        done.record(streams.current())
        was_busy = not streams.is_done(done)
        observe()
        is_busy = not streams.is_done(done)
        module.synchronize(device)
        if is_busy:
            return f"{watched}; returned while {seconds} s of earlier work was still queued"
        was_late = was_late or was_busy
    if was_late:
        raise Fault("returned only after 2 s of work that was queued before it")
    text = f"{watched}; work for seconds was done as soon as it was queued"
    if has_watch:
        return text
    raise NotCheckable(text)


def _enqueue_work(device: torch.device, synchronize: Callable[[Any], None], seconds: float) -> None:
    """Puts so many seconds of matrix products on the current stream: large matrices, since queues
    are short.
    """
    size, each = 128, 0.0
    while each < 0.005 and size < 8192:
        size *= 2
        x = torch.full((size, size), 1e-3, device=device)
        torch.matmul(x, x)
        synchronize(device)
        began = time.perf_counter()
        torch.matmul(x, x)
        synchronize(device)
        each = time.perf_counter() - began
    for _ in range(min(int(seconds / each) + 1, 400)):
        torch.matmul(x, x)


# ---- install() ----------------------------------------------------------------------------------


class _Faulty(nn.Module):
    """Passes its input on; armed, with the bits of a NaN in it: no arithmetic, so that it is a NaN
    on a device that saturates too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.armed = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 1.0
        if self.armed:
            with torch.no_grad():
                x.view(torch.int32).view(-1)[3:4].fill_(_NAN_BITS)
        return x


def _model() -> nn.Sequential:
    """Weights by formula: no random number is drawn of the caller's."""
    model = nn.Sequential()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        for i in range(4):
            model.add_module(f"layer{i}", nn.Linear(32, 32))
            model.add_module(f"act{i}", nn.Tanh())
        model.add_module("head", nn.Linear(32, 1))
        # The last: arithmetic of a device that saturates makes numbers of a NaN.
        model.add_module("faulty", _Faulty())
        for number, parameter in enumerate(model.parameters()):
            ramp = torch.linspace(-0.3, 0.3, parameter.numel()).sin()
            parameter.copy_(ramp.roll(7 * number).view_as(parameter))
    return model


def check_install(device: torch.device) -> str:
    """A model trains without an event, then a module makes a NaN: the run stops, and names it."""
    if device.type != "cpu" and streams_of(device) is None:
        raise NotCheckable(f"install() reads nothing of torch.{device.type}: no streams")
    healthy, patience = 5, 10
    model: Any = _model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    x = torch.linspace(-1, 1, 16 * 32).view(16, 32).to(device)
    step = 0
    with tempfile.TemporaryDirectory(prefix="fastcheck-selftest-") as folder:
        monitor = install(model, log_dir=folder)
        try:
            for step in range(healthy + patience):
                model.faulty.armed = step == healthy
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
            monitor.flush()
        except OverflowDetected as stop:
            if step < healthy:
                text = f"stopped at step {step}, before any fault: {first_line(stop)}"
                raise Fault(text) from stop
            where = (stop.culprit.site.module, stop.culprit.site.role, stop.step)
            if where != ("faulty", "output", healthy):
                raise Fault(f"named {where}, expected ('faulty', 'output', {healthy})") from stop
            return f"stopped {step - healthy} steps after the fault"
        finally:
            with contextlib.suppress(OverflowDetected):  # of a later step, stopped already
                monitor.remove()
    raise Fault(f"a NaN in step {healthy} did not stop the run by step {step}")


#: The checks by name, in the order in which they run.
CHECKS: dict[str, Callable[[torch.device], str]] = {
    "values": check_values,
    "no-wait": check_no_wait,
    "install": check_install,
}
