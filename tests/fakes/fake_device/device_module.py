"""The module that load() registers as torch.<name>: a device module, and controls that only a fake
has.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, Callable, Optional, Union

import torch

from . import fake_device_C as _C  # type: ignore[attr-defined]  # compiled, without a stub

DeviceLike = Union[int, str, torch.device, None]


def name() -> str:
    """The device type's name: "fake", "npu" or "mlu"."""
    return str(torch._C._get_privateuse1_backend_name())


def _index(device: DeviceLike) -> int:
    if isinstance(device, int):
        return device
    if device is None:
        return int(_C.current_device())
    device = torch.device(device)
    if device.type != name():
        raise ValueError(f"expected a device of type {name()!r}, got {device}")
    return int(_C.current_device()) if device.index is None else device.index


# ---- Devices -------------------------------------------------------------------------------------


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def _lazy_init() -> None:
    pass


_pid = os.getpid()


def _is_in_bad_fork() -> bool:
    """True in a child of a process that uses the device: its streams' threads are not there."""
    return os.getpid() != _pid


def device_count() -> int:
    return int(_C.DEVICES)


def current_device() -> int:
    return int(_C.current_device())


def set_device(device: DeviceLike) -> None:
    _C.set_device(_index(device))


def get_device_name(device: DeviceLike = None) -> str:
    return f"fake device {_index(device)}"


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16]


class device:  # noqa: N801  # named as torch.cuda's
    """Context manager: makes a device the current one."""

    def __init__(self, device: DeviceLike) -> None:
        self._index = _index(device)
        self._before = -1

    def __enter__(self) -> None:
        self._before = current_device()
        set_device(self._index)

    def __exit__(self, *exc: object) -> None:
        set_device(self._before)


def synchronize(device: DeviceLike = None) -> None:
    """Waits for every stream of the device (counted: device_synchronize)."""
    _C.synchronize(_index(device))


# ---- Streams and events --------------------------------------------------------------------------


class Stream(torch.Stream):
    """One of the device's 32 pool streams, in turn. Also torch.Stream(device=...)."""

    def __new__(cls, device: DeviceLike = None, priority: int = 0, **handle: int) -> Stream:
        if handle:
            return super().__new__(cls, **handle)
        return super().__new__(cls, torch.device(name(), _index(device)), priority=priority)


def Event(enable_timing: bool = False, blocking: bool = False) -> torch.Event:  # noqa: N802  # named as torch.cuda's
    """A torch.Event. Not a class: torch.Event.elapsed_time takes no subclass of it."""
    return torch.Event(name(), enable_timing=enable_timing, blocking=blocking)


def _stream(index: int, stream_id: int) -> torch.Stream:
    kind = int(torch._C._autograd.DeviceType.PrivateUse1.value)
    return torch.Stream(stream_id=stream_id, device_index=index, device_type=kind)


def current_stream(device: DeviceLike = None) -> torch.Stream:
    index = _index(device)
    return _stream(index, _C.current_stream(index))


def default_stream(device: DeviceLike = None) -> torch.Stream:
    return _stream(_index(device), 0)


def set_stream(stream: torch.Stream) -> None:
    """Makes `stream` current, and its device too, as torch.cuda.set_stream does."""
    _C.set_device(stream.device_index)
    _C.set_stream(stream.device_index, stream.stream_id)


@contextmanager
def stream(stream: Optional[torch.Stream]) -> Iterator[None]:
    """Context manager: makes a stream and its device current."""
    if stream is None:
        yield
        return
    before_device = current_device()
    before = current_stream(stream.device_index)
    set_stream(stream)
    try:
        yield
    finally:
        set_stream(before)
        _C.set_device(before_device)


def is_current_stream_capturing() -> bool:
    """Whether what is launched on the current stream becomes part of a graph.

    Graphs are torch.accelerator.Graph; random numbers are drawn once, at the capture.
    """
    index = current_device()
    return bool(_C.is_capturing(index, _C.current_stream(index)))


# ---- Random numbers ------------------------------------------------------------------------------


def _generator(device: DeviceLike) -> torch.Generator:
    generator: torch.Generator = torch.ops.fake_device.default_generator(_index(device))
    return generator


def manual_seed(seed: int) -> None:
    _generator(None).manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    for index in range(device_count()):
        _generator(index).manual_seed(seed)


def seed_all() -> None:
    seed = _generator(None).seed()
    manual_seed_all(seed)


def initial_seed() -> int:
    return _generator(None).initial_seed()


def get_rng_state(device: DeviceLike = None) -> torch.Tensor:
    """A CPU tensor; no wait, the state lives on the host."""
    return _generator(device).get_state()


def set_rng_state(state: torch.Tensor, device: DeviceLike = None) -> None:
    _generator(device).set_state(state)


def get_rng_state_all() -> list[torch.Tensor]:
    return [get_rng_state(index) for index in range(device_count())]


def set_rng_state_all(states: list[torch.Tensor]) -> None:
    for index, state in enumerate(states):
        set_rng_state(state, index)


# ---- Memory --------------------------------------------------------------------------------------


def memory_stats(device: DeviceLike = None) -> dict[str, int]:
    """Bytes: allocated and reserved (below the cache), their peaks, and the limit."""
    return dict(_C.memory_stats(_index(device)))


def memory_allocated(device: DeviceLike = None) -> int:
    return memory_stats(device)["allocated"]


def max_memory_allocated(device: DeviceLike = None) -> int:
    return memory_stats(device)["allocated_peak"]


def memory_reserved(device: DeviceLike = None) -> int:
    return memory_stats(device)["reserved"]


def max_memory_reserved(device: DeviceLike = None) -> int:
    return memory_stats(device)["reserved_peak"]


def reset_peak_memory_stats(device: DeviceLike = None) -> None:
    _C.reset_peaks(_index(device))


def empty_cache() -> None:
    """Gives cached blocks back below the cache. Waits for both devices, uncounted."""
    for index in range(device_count()):
        _C.empty_cache(index)


def set_memory_limit(limit_bytes: int, device: DeviceLike = None) -> None:
    """More than this below the cache raises torch.OutOfMemoryError (16 GiB to begin with)."""
    _C.set_memory_limit(_index(device), limit_bytes)


def set_poison(on: bool) -> None:
    """Whether fresh and freed device memory is filled with 0xff bytes (on to begin with)."""
    _C.set_poison(on)


# ---- Counters ------------------------------------------------------------------------------------


class Counts(dict[str, int]):
    """Counter name -> count."""

    @property
    def synchronisations(self) -> int:
        """How often the host waited for the device, whatever for."""
        return sum(self[key] for key in _C.synchronisation_names())

    def __sub__(self, before: Counts) -> Counts:
        return Counts({key: value - before[key] for key, value in self.items()})

    def nonzero(self) -> dict[str, int]:
        return {key: value for key, value in self.items() if value}


def counters(thread: Optional[threading.Thread] = None) -> Counts:
    """All counters since the start or the last reset: of every thread, or of one."""
    if thread is None:
        return Counts(_C.counters())
    return Counts(_C.counters_of(thread.ident))


def reset_counters() -> None:
    _C.reset_counters()


def set_sync_debug_mode(mode: str) -> None:
    """With "error", what makes the host wait raises RuntimeError, except waits on events (as CUDA).

    With "default" nothing raises.
    """
    if mode not in ("default", "error"):
        raise ValueError(f'expected "default" or "error", got {mode!r}')
    _C.set_sync_debug(mode == "error")


def get_sync_debug_mode() -> str:
    return "error" if _C.sync_debug() else "default"


# ---- What only a fake can do ---------------------------------------------------------------------


def _streams(stream: Optional[torch.Stream]) -> list[tuple[int, int]]:
    if stream is not None:
        return [(stream.device_index, stream.stream_id)]
    known = [(index, each) for index in range(device_count()) for each in _C.streams(index)]
    return sorted({*known, *((index, 0) for index in range(device_count()))})


def set_delay(microseconds: int, stream: Optional[torch.Stream] = None) -> None:
    """Every kernel starts this much later. No stream given: every stream there is and will be."""
    if stream is None:
        _C.set_default_delay(microseconds)
    else:
        _C.set_delay(stream.device_index, stream.stream_id, microseconds)


def hold(stream: Optional[torch.Stream] = None) -> None:
    """Freezes a stream until release(). No stream given: all used so far, and the default ones."""
    for each in _streams(stream):
        _C.hold(*each)


def release(stream: Optional[torch.Stream] = None) -> None:
    for each in _streams(stream):
        _C.release(*each)


def settle() -> None:
    """Between tests: nothing held, delayed or still to run, and device 0 is the current one."""
    set_delay(0)
    release()
    set_sync_debug_mode("default")
    set_device(0)
    for index in range(device_count()):
        synchronize(index)


def advance(kernels: int, stream: Optional[torch.Stream] = None) -> None:
    """Lets a held stream run so many more kernels, and the events right behind. Returns at once."""
    current = current_stream() if stream is None else stream
    _C.advance(current.device_index, current.stream_id, kernels)


@contextmanager
def held(stream: Optional[torch.Stream] = None) -> Iterator[None]:
    """Context manager: hold(), then release()."""
    hold(stream)
    try:
        yield
    finally:
        release(stream)


class recorded_launches:  # noqa: N801  # a context manager, named as torch's are
    """Context manager: `as names` is, afterwards, a list of "device:stream op", as launched."""

    def __enter__(self) -> list[str]:
        self._names: list[str] = []
        _C.record_launches(True)
        return self._names

    def __exit__(
        self,
        kind: Optional[type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        _C.record_launches(False)
        self._names.extend(_C.take_launches())


def lose(message: str = "CUDA error: device-side assert triggered") -> None:
    """A kernel on the current stream fails, in its turn, in a way that CUDA does not recover from:
    from then on no kernel runs, and every launch, query and wait raises ``message``. Returns when
    it has failed.
    """
    index = current_device()
    _C.lose(index, _C.current_stream(index), message)
    with suppress(RuntimeError):
        synchronize(index)


def find_again(device: DeviceLike = None) -> None:
    """The opposite of lose(), for the tests that follow. What was dropped stays dropped."""
    _C.find_again(_index(device))


def launch(function: Callable[..., Any], *arguments: Any, name: str = "python kernel") -> None:
    """Runs function(*arguments) on the current stream of the first tensor's device, in its turn.

    Device tensors among the arguments reach the function as CPU tensors over the device's memory.
    It must only compute in them: it runs on the stream's thread, where waiting or launching
    raises. Like any kernel it keeps no tensor alive.
    """
    device_type = torch._C._get_privateuse1_backend_name()
    tensors = [a for a in arguments if isinstance(a, torch.Tensor)]
    devices = [t.device.index for t in tensors if t.device.type == device_type]
    index = devices[0] if devices else current_device()
    views = [
        torch.ops.fake_device.kernel_view(a.detach()) if isinstance(a, torch.Tensor) else a
        for a in arguments
    ]
    _C.launch(index, _C.current_stream(index), name, lambda: function(*views))
