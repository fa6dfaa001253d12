"""The CUDA kernels, where they were built and can run.

Nothing here waits for the device. Records equal the CPU's bit for bit (``docs/determinism.md``).
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Callable, Optional

import torch

from fastcheck.extension import status as extension_status
from fastcheck.kernels import kernels
from fastcheck.kernels import status as kernel_status
from fastcheck.record.exponents import EXPONENT_WORDS
from fastcheck.record.format import RECORD_BYTES, DeviceMode
from fastcheck.utils.torch.own_operators import no_grad

from .backend import Backend, BlackBox, TensorArgument, arguments_of

# The limit of csrc/cuda/launch.h: more tensors of a dtype need a table. A graph's replay would read
# a table again, from pinned memory that is used for something else by then.
_WITHOUT_TABLE = 32

_RELAXED = 2  # cudaStreamCaptureModeRelaxed
_FIRST_COUNTERS = 256
_FIRST_BYTES = 64 * 1024


def problem(module: Any, index: int) -> str:
    """The reason why the kernels of ``module`` can't run on this CUDA device; empty when they
    can.
    """
    try:
        with torch.cuda.device(index):
            torch.cuda.current_stream()
            module.cuda_device()
    except RuntimeError as error:
        return str(error)
    return ""


@dataclass
class _Pinned:
    """Pinned memory that the stream reads, and the event behind that reading."""

    memory: torch.Tensor
    passed: Any


@dataclass
class _Buffers:
    counters: Optional[torch.Tensor] = None  # int32, zero between launches
    partials: Optional[torch.Tensor] = None
    table: Optional[torch.Tensor] = None
    pinned: list[_Pinned] = field(default_factory=list)


@dataclass(eq=False)
class Launches:
    """The ``cuda_`` functions of the extension. ``module`` is ``fastcheck._kernels``, ``api``
    ``torch.cuda``, or a module with its streams and events; ``handle`` gives a stream's address.

    Slots are uint8 (n, 192) on the tensors' device. ValueError and IndexError for other slots, and
    for tensors on several devices; RuntimeError is what CUDA returned for a launch.
    """

    _module: Any
    _api: Any
    _handle: Callable[[Any], int] = operator.attrgetter("cuda_stream")

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._multiprocessors: dict[int, int] = {}
        self._buffers: dict[tuple[int, int], _Buffers] = {}
        self.cuda_exchange_capture_mode = self._module.cuda_exchange_capture_mode

    def cuda_observe(
        self, tensor: torch.Tensor, slots: torch.Tensor, index: int, depth: int
    ) -> None:
        """Launches the writing of ``slots[index]``, a whole record but for the host's fields, which
        are 0.
        """
        self.cuda_observe_list([tensor], slots, index, depth)

    def cuda_observe_list(
        self,
        tensors: Sequence[torch.Tensor],
        slots: torch.Tensor,
        first: int,
        depth: int,
        logical: bool = False,
        gate: Optional[torch.Tensor] = None,
    ) -> None:
        """Launches the writing of ``slots[first : first + len(tensors)]``, which does nothing where
        ``gate``, int32 of one element on their device, is 0 by then.
        """
        _check_slots(slots, first, len(tensors))
        address = slots.data_ptr() + first * RECORD_BYTES
        opens = 0 if gate is None else gate.data_ptr()

        def launch(
            part: list[TensorArgument],
            done: int,
            processors: int,
            workspace: tuple[int, ...],
            stream: int,
        ) -> None:
            to = address + done * RECORD_BYTES
            where = (*workspace[:-1], opens)
            self._module.cuda_records(part, logical, depth, to, processors, where, stream)

        self._in_parts(tensors, slots.device, logical, launch)

    def cuda_found_nonfinite(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """float32, 0-dim, on the tensors' device: 1.0 where any has a NaN or an infinity. On the
        CPU for no tensors.
        """
        device = tensors[0].device if tensors else torch.device("cpu")
        with no_grad(), torch._C._DisableTorchDispatch():
            flag = torch.zeros((), dtype=torch.float32, device=device)

        def launch(part: list[TensorArgument], _: int, *where: Any) -> None:
            self._module.cuda_found_nonfinite(part, flag.data_ptr(), *where)

        self._in_parts(tensors, device, False, launch)
        return flag

    def cuda_exponents(self, tensor: torch.Tensor, logical: bool = False) -> torch.Tensor:
        """int64 (328,) on the tensor's device, its exponent counts."""
        return self._exponents(tensor, logical, 0)

    def cuda_observe_and_count(
        self, tensor: torch.Tensor, slots: torch.Tensor, index: int
    ) -> torch.Tensor:
        """``cuda_observe`` at full depth and ``cuda_exponents``, in one launch."""
        _check_slots(slots, index, 1)
        if tensor.device != slots.device:
            raise ValueError(f"expected a tensor on {slots.device}, got one on {tensor.device}")
        return self._exponents(tensor, False, slots.data_ptr() + index * RECORD_BYTES)

    def _exponents(self, tensor: torch.Tensor, logical: bool, slot: int) -> torch.Tensor:
        if not (tensor.is_floating_point() or tensor.is_complex()):
            raise TypeError(
                f"expected a floating-point or complex dtype, got {tensor.dtype}, which has no "
                "exponents"
            )
        with no_grad(), torch._C._DisableTorchDispatch():
            words = torch.empty(EXPONENT_WORDS, dtype=torch.int64, device=tensor.device)

        def launch(part: list[TensorArgument], _: int, *where: Any) -> None:
            self._module.cuda_exponents(part, logical, slot, words.data_ptr(), *where)

        def sizes(part: list[TensorArgument], processors: int) -> tuple[int, int, int]:
            return self._module.cuda_exponents_workspace(part, logical, slot != 0, processors)

        self._in_parts([tensor], tensor.device, logical, launch, sizes)
        return words

    def _in_parts(
        self,
        tensors: Sequence[torch.Tensor],
        device: torch.device,
        logical: bool,
        launch: Callable[..., None],
        sizes_of: Optional[Callable[..., tuple[int, int, int]]] = None,
    ) -> None:
        """launch(arguments, how many were done before, multiprocessors, workspace, stream), once or
        for parts of the list that a launch can take. ``sizes_of(arguments, multiprocessors)``: of
        the workspace, where it is not that of records.
        """
        if not tensors:
            return
        for tensor in tensors:
            if tensor.device != device:
                raise ValueError(f"expected all tensors on {device}, got one on {tensor.device}")
        # Memory for buffers is plain memory, whatever the caller's modes.
        with self._api.device(device), no_grad(), torch._C._DisableTorchDispatch(), self._lock:
            stream = self._api.current_stream(device)
            handle = self._handle(stream)
            processors = self._processors_of(device.index)
            arguments, kept = arguments_of(tensors)
            is_external = stream.stream_id == handle != 0  # may be destroyed, and its handle reused
            if is_external or self._module.cuda_is_capturing(handle):
                buffers, most = _Buffers(), _WITHOUT_TABLE
            else:
                buffers = self._buffers.setdefault((device.index, handle), _Buffers())
                most = len(arguments)
            for done in range(0, len(arguments), most):
                part = arguments[done : done + most]
                if sizes_of is None:
                    sizes = self._module.cuda_workspace(part, logical, processors)
                else:
                    sizes = sizes_of(part, processors)
                workspace, pinned = self._workspace(buffers, sizes, device)
                try:
                    launch(part, done, processors, workspace, handle)
                finally:
                    if pinned is not None:
                        pinned.passed.record(stream)
            del kept  # freed in the order of the stream

    def _processors_of(self, index: int) -> int:
        if index not in self._multiprocessors:
            self._multiprocessors[index] = self._module.cuda_device()
        return self._multiprocessors[index]

    def _workspace(
        self, buffers: _Buffers, sizes: tuple[int, int, int], device: torch.device
    ) -> tuple[tuple[int, ...], Optional[_Pinned]]:
        """The buffers of a launch, as the kernels take them, and the pinned table among them."""
        counters, partials_bytes, table_bytes = sizes
        if _is_smaller(buffers.counters, counters):
            size = _grown(counters, _FIRST_COUNTERS)
            buffers.counters = torch.zeros(size, dtype=torch.int32, device=device)
        if _is_smaller(buffers.partials, partials_bytes):
            size = _grown(partials_bytes, _FIRST_BYTES)
            buffers.partials = torch.empty(size, dtype=torch.uint8, device=device)
        assert buffers.counters is not None and buffers.partials is not None
        of_all = (buffers.counters.data_ptr(), buffers.partials.data_ptr(), len(buffers.partials))
        if not table_bytes:
            return (*of_all, 0, 0, 0, 0), None
        if _is_smaller(buffers.table, table_bytes):
            size = _grown(table_bytes, _FIRST_BYTES)
            buffers.table = torch.empty(size, dtype=torch.uint8, device=device)
        assert buffers.table is not None
        pinned = self._pinned(buffers, len(buffers.table), table_bytes)
        table = (pinned.memory.data_ptr(), buffers.table.data_ptr(), table_bytes)
        return (*of_all, *table, 0), pinned

    def _pinned(self, buffers: _Buffers, size: int, table_bytes: int) -> _Pinned:
        """A pinned table that the stream has passed, of ``table_bytes`` at least."""
        # A query does not end another thread's capture in this mode.
        before = self._module.cuda_exchange_capture_mode(_RELAXED)
        try:
            free = next((table for table in buffers.pinned if table.passed.query()), None)
        finally:
            if before >= 0:
                self._module.cuda_exchange_capture_mode(before)
        if free is None or _is_smaller(free.memory, table_bytes):
            memory = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
            if free is None:
                free = _Pinned(memory, self._api.Event())
                buffers.pinned.append(free)
            free.memory = memory
        return free


def _is_smaller(buffer: Optional[torch.Tensor], wanted: int) -> bool:
    return buffer is None or len(buffer) < wanted


def _grown(wanted: int, size: int) -> int:
    """A power of two, so that a size that creeps up does not allocate each time."""
    while size < wanted:
        size *= 2
    return size


def _check_slots(slots: torch.Tensor, first: int, count: int) -> None:
    if slots.dtype != torch.uint8 or not slots.is_contiguous():
        raise ValueError(
            f"expected slots in a contiguous uint8 tensor, got {slots.dtype} with strides "
            f"{slots.stride()}"
        )
    capacity = slots.numel() // RECORD_BYTES
    if first < 0 or first + count > capacity:
        raise IndexError(
            f"expected slots within a ring of {capacity}, got [{first}, {first + count})"
        )


def cuda_problem(index: Optional[int] = None) -> Optional[str]:
    """The reason why tensors of this CUDA device are read by the portable backend; None where the
    kernels read them. The device (the current one by default) gets a context if it has none yet.
    """
    module = kernels()
    if module is None:
        return "there are no compiled kernels"
    if not (kernel_status.accelerator or "").startswith("cuda"):
        return "the extension was built without the CUDA kernels"
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    device = torch.cuda.current_device() if index is None else index
    if extension_status.module is not None:
        reason: str = extension_status.module.cuda_problem(device)
    else:
        reason = problem(module, device)
    return f"the kernels can't run: {reason}" if reason else None


def cuda_backend() -> Backend:
    """The backend of the CUDA kernels, which are there. The compiled extension launches them, or
    Python where there is none for this torch.
    """
    if extension_status.module is not None:
        return backend_of(extension_status.module)
    return backend_of(Launches(kernels(), torch.cuda))


def backend_of(launches: Any) -> Backend:
    """The backend of an object with the ``cuda_`` functions of the extension. Python's launches
    have no black box, and no function for C++.
    """
    box = getattr(launches, "cuda_box", None)
    direct = getattr(launches, "cuda_direct_observe", None)
    return Backend(
        name="cuda",
        determinism="bitwise",
        device_mode=DeviceMode.IEEE,
        observe=launches.cuda_observe,
        observe_list=launches.cuda_observe_list,
        found_nonfinite=launches.cuda_found_nonfinite,
        exponents=launches.cuda_exponents,
        observe_and_count=launches.cuda_observe_and_count,
        capture_list=launches.cuda_observe_list,
        reads_lists_in_one_launch=True,
        black_box=None
        if box is None
        else BlackBox(begin=launches.cuda_begin_stretch, contents=box),
        exchange_capture_mode=launches.cuda_exchange_capture_mode,
        direct_observe=None if direct is None else direct(),
    )
