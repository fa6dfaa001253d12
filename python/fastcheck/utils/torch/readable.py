"""Decides which tensors the kernels can read: hooks skip the others, public functions raise. Names
the first element of a tensor that is not finite.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Callable, Optional

import torch
from torch.nn.parameter import is_lazy

from fastcheck.errors import UnsupportedTensorError
from fastcheck.extension import status
from fastcheck.kernels import kernels
from fastcheck.record.format import DTYPES
from fastcheck.utils.torch.own_operators import unobserved

_READABLE = frozenset(getattr(torch, row.name) for row in DTYPES if hasattr(torch, row.name))
_NONFINITE = frozenset(t for t in _READABLE if t.is_floating_point or t.is_complex)
_PLAIN_DISPATCH = torch.Tensor.__torch_dispatch__


def hook_gradient(tensor: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> Optional[Any]:
    """Registers a hook for the gradient of a tensor. Returns the handle of that of a leaf, which
    outlives the step and would gather a hook in each.
    """
    register: Any = tensor.register_hook  # torch leaves it untyped
    try:
        handle = register(hook)
        return handle if tensor.is_leaf else None
    except RuntimeError:  # a view without a graph, of what was written to since: it has no gradient
        return None


def can_hold_nonfinite(tensor: torch.Tensor) -> bool:
    """Floating point or complex, of a dtype that has a kernel."""
    return tensor.dtype in _NONFINITE


def can_read(tensor: torch.Tensor) -> bool:
    """Ordinary memory of any device that holds what it is to hold, in the order of its stream."""
    if status.module is not None and status.module.is_readable(tensor):
        return True
    return is_plain(tensor) and not may_be_in_flight(tensor)


# 0 unless torch.cuda.set_sync_debug_mode() tells of what makes the host wait for a device.
_sync_debug_mode: Callable[[], int] = getattr(torch._C, "_cuda_get_sync_debug_mode", int)


def may_wait() -> bool:
    """False where the program has torch tell of all that makes the host wait for a device: what
    fastcheck reads there on the host, now and then, is left out.
    """
    return _sync_debug_mode() == 0


def can_read_now(tensor: torch.Tensor) -> bool:
    """True if its numbers can be read on the host, which may have to wait for a device."""
    return can_read(tensor) and (tensor.is_cpu or may_wait())


@contextlib.contextmanager
def waits_untold() -> Iterator[None]:
    """Keeps torch from telling of waits within a ``with`` statement: a stop waits anyway."""
    mode = _sync_debug_mode()
    if mode:
        torch._C._cuda_set_sync_debug_mode(0)
    try:
        yield
    finally:
        if mode:
            torch._C._cuda_set_sync_debug_mode(mode)


def _are_on_host(tensors: Sequence[torch.Tensor]) -> bool:
    return all(tensor.is_cpu for tensor in tensors)


#: True if all of them are in the host's memory.
are_on_host: Callable[[Sequence[torch.Tensor]], bool]
are_on_host = _are_on_host if status.module is None else status.module.are_on_host


def _common_device(tensors: Sequence[torch.Tensor]) -> Optional[torch.device]:
    devices = {tensor.device for tensor in tensors}
    return devices.pop() if len(devices) == 1 else None


#: The device of all of them; None: there are several, or no tensors.
common_device: Callable[[Sequence[torch.Tensor]], Optional[torch.device]]
common_device = _common_device if status.module is None else status.module.common_device


def may_be_in_flight(tensor: torch.Tensor) -> bool:
    """True if a copy from a device may still be under way to it: with ``non_blocking=True`` such a
    copy is waited for by nothing, and its memory is pinned. Nothing of a tensor tells when it has
    arrived.
    """
    if not tensor.is_cpu:
        return False
    if status.module is not None:
        return bool(status.module.may_be_in_flight(tensor))
    with torch._C._DisableTorchDispatch():  # no operator of the program
        try:
            return tensor.is_pinned()
        except RuntimeError:  # of autograd.grad(is_grads_batched=True), which has no memory
            return True


def is_plain(tensor: torch.Tensor) -> bool:
    """Ordinary memory of any device: not sparse, nested, fake, meta, or wrapped by a functorch
    transform.
    """
    return (
        not tensor.is_meta
        and tensor.dtype in _READABLE
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and type(tensor).__torch_dispatch__ is _PLAIN_DISPATCH
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    )


def is_unpacked_by_torch(saved: Any) -> bool:
    """True if no code of the program runs where a node's tensor is unpacked, of which ``saved`` is
    the attribute ``_raw_saved_...``: neither a hook, nor the operators of a class of tensors.
    """
    if getattr(saved, "unpack_hook", True) is not None:
        return False
    kind = type(getattr(saved, "data", None))
    return getattr(kind, "__torch_dispatch__", _PLAIN_DISPATCH) is _PLAIN_DISPATCH


def is_materialised(tensor: torch.Tensor) -> bool:
    """False for a parameter or buffer of a lazy module before its first forward: it has neither a
    shape nor memory, and raises where it is asked for them.
    """
    return not is_lazy(tensor)


def unreadable_reason(tensor: torch.Tensor) -> Optional[str]:
    """The reason why no kernel reads ``tensor``: what was expected, what it got, a hint. None when
    it can be read. Same texts as ``csrc/torch/read/tensor_view.cpp``, which checks CPU tensors.
    """
    if not is_materialised(tensor):
        return (
            "expected a tensor with memory, got a parameter or buffer of a lazy module before its "
            "first forward; run the module once"
        )
    if tensor.is_nested or tensor.layout is not torch.strided:
        nested = " (nested)" if tensor.is_nested else ""
        return (
            f"expected a strided tensor, got layout {str(tensor.layout).replace('torch.', '')}"
            f"{nested}; give its values (sparse: x.coalesce().values(), nested: x.values())"
        )
    if tensor.is_quantized:
        return "expected a plain tensor, got a quantized one; give x.int_repr() or x.dequantize()"
    if tensor.dtype not in _READABLE:
        names = ", ".join(row.name for row in DTYPES)
        return (
            f"expected one of the supported dtypes ({names}), got "
            f"{str(tensor.dtype).replace('torch.', '')}; convert it with x.to(...) first"
        )
    if tensor.is_meta and type(tensor).__torch_dispatch__ is _PLAIN_DISPATCH:
        return "expected a tensor with memory, got a meta tensor; materialise it first"
    if not is_plain(tensor):
        return (
            "expected a plain tensor, got a tensor subclass that has no memory of its own (a fake "
            "tensor, a DTensor, a vmap or grad wrapper); give the local tensor"
        )
    return freed_reason(tensor)


def freed_reason(tensor: torch.Tensor) -> Optional[str]:
    """The reason why a strided tensor's storage does not hold all of its elements; None when it
    does.
    """
    held = tensor.untyped_storage().nbytes()
    if not tensor.numel() or held >= (needed := _bytes_reached(tensor)):
        return None
    return (
        "expected a tensor whose storage holds all its elements, got one that needs "
        f"{needed} bytes over a storage of {held}; its memory was freed or resized (a sharded "
        "parameter outside its forward?)"
    )


def without_bytes(tensor: torch.Tensor) -> Optional[str]:
    """The reason why ``tensor`` has no bytes of its own in row-major order; None when it has
    them.
    """
    if not is_materialised(tensor):
        return "a parameter or buffer of a lazy module; run the module once"
    if tensor.is_nested:
        return "a nested tensor; give its values()"
    if tensor.layout is not torch.strided:
        return f"layout {tensor.layout}; give its values()"
    if tensor.is_quantized:
        return "a quantized tensor; give its int_repr()"
    if tensor.is_meta or type(tensor).__torch_dispatch__ is not _PLAIN_DISPATCH:
        kind = type(tensor).__name__
        return f"a {kind} without memory (meta, fake or wrapped); give the tensor inside"
    needed = _bytes_reached(tensor)
    held = tensor.untyped_storage().nbytes()
    if tensor.numel() and held < needed:
        return f"one that needs {needed} bytes over a storage of {held}; it was freed or resized"
    return None


def _bytes_reached(tensor: torch.Tensor) -> int:
    """The bytes from the start of the storage to the end of the last element."""
    strides = zip(tensor.shape, tensor.stride())
    last = tensor.storage_offset() + sum((size - 1) * stride for size, stride in strides)
    return (int(last) + 1) * tensor.element_size()


def is_dense(tensor: torch.Tensor) -> bool:
    """True if the elements fill one block of memory without gap or overlap, in any permutation."""
    if tensor.is_contiguous() or tensor.numel() < 2:
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def has_memory(tensor: torch.Tensor) -> bool:
    """False for a sharded parameter between its uses: a shape over an empty storage; and for one
    that is not materialised.
    """
    return is_materialised(tensor) and (
        tensor.numel() == 0 or tensor.untyped_storage().nbytes() > 0
    )


def has_values(tensor: torch.Tensor) -> bool:
    """False for a tensor that is not materialised, or whose storage does not hold all of its
    elements: torch itself would read beyond it. Any layout.
    """
    if not is_materialised(tensor):
        return False
    is_strided = tensor.layout is torch.strided and not tensor.is_nested
    return not is_strided or freed_reason(tensor) is None


def not_a_tensor(x: object, expected: str = "a torch.Tensor") -> UnsupportedTensorError:
    return UnsupportedTensorError(
        f"expected {expected}, got {type(x).__name__}; give torch.as_tensor(x) for numbers or an "
        "array, list(x.parameters()) for the weights of a model"
    )


def check(x: torch.Tensor) -> None:
    kernels()  # raises where FASTCHECK_CPU_ISA is not usable
    reason = unreadable_reason(x)
    if reason is not None:
        raise UnsupportedTensorError(reason)


def check_list(tensors: Sequence[object]) -> None:
    kernels()
    for number, x in enumerate(tensors):
        reason = unreadable_reason(x) if isinstance(x, torch.Tensor) else str(not_a_tensor(x))
        if reason is not None:
            raise UnsupportedTensorError(f"item {number}: {reason}")
    check_devices(tensors)


def check_devices(tensors: Sequence[object]) -> None:
    devices = [x.device for x in tensors if isinstance(x, torch.Tensor)]
    for number, device in enumerate(devices):
        if device != devices[0] and device.type != "meta":
            raise UnsupportedTensorError(
                f"item {number}: expected a tensor on {devices[0]}, where the first one is, got "
                f"one on {device}; read the tensors of each device in a call of their own"
            )


def first_bad(name: str, tensor: torch.Tensor) -> str:
    """The place of the first NaN or Inf of a tensor, as a sentence with a blank before it; empty
    where it has none, or one element only.
    """
    with unobserved(), torch.no_grad():
        bad = (~torch.isfinite(tensor.detach())).nonzero()
    if not tensor.dim() or not len(bad) or tensor.numel() == 1:
        return ""
    first, rows = bad[0].tolist(), len(set(bad[:, 0].tolist()))
    return (
        f" The first bad element of {name} is {first}, in row {first[0]:,}: {rows:,} of "
        f"{len(tensor):,} rows hold{'s' if rows == 1 else ''} NaN or Inf."
    )
