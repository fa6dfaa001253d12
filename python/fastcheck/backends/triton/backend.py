"""The Triton backend, for devices that have a Triton compiler and no compiled kernels.

Those are Ascend NPUs, Cambricon MLUs and AMD GPUs; NVIDIA GPUs and Triton's interpreter on request.
One source serves all of them (``kernels.py``). The portable backend reads dtypes without a kernel,
and those that a target's compiler refuses; the same fields are exact. triton is imported when the
first tensor of such a device is read.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Sequence
from typing import Any, Optional

import torch

from fastcheck.backends.backend import Backend
from fastcheck.backends.portable import backend as portable
from fastcheck.backends.portable.backend import any_nonfinite
from fastcheck.backends.portable.traversal import Traversal, traverse
from fastcheck.errors import ConfigError, first_line, near_matches
from fastcheck.record.format import RECORD_BYTES, Depth, DeviceMode

#: ``auto``: devices without a kernel of their own; ``on``: CUDA too, and with TRITON_INTERPRET=1
#: every device, in Triton's interpreter; ``off``: none. Read at a device's first tensor.
SWITCH = "FASTCHECK_TRITON"
_MODES = ("auto", "on", "off")

#: Devices that Triton reads unless something is missing; remarks() then has a line.
_EXPECTED = frozenset({"npu", "mlu", "amd"})

#: Reasons for the portable backend, by kind of device and, where the compiler refused a kernel,
#: dtype.
_given_up: dict[tuple[str, Optional[torch.dtype]], str] = {}
#: The same of kernels for lists, by kind of device: tensors are then read one by one.
_lists_given_up: dict[str, str] = {}


def triton_mode() -> str:
    """The value of ``FASTCHECK_TRITON``, in lower case.

    Raises:
        ConfigError: something else than auto, on or off.
    """
    value = os.environ.get(SWITCH, "") or "auto"
    if value.lower() not in _MODES:
        near = near_matches(value, _MODES)
        raise ConfigError(
            f"unknown {SWITCH}",
            expected="one of " + ", ".join(_MODES),
            got=repr(value),
            hint=f"{SWITCH}={near[0] if near else 'auto'}, or unset it",
        )
    return value.lower()


def triton_problem(device_type: str) -> Optional[str]:
    """The reason why tensors of this type of device are not read by Triton; None where they are.

    Raises:
        ConfigError: see :func:`triton_mode`.
    """
    chosen, kind = triton_mode(), _kind(device_type)
    if chosen == "off":
        return f"{SWITCH}=off"
    if chosen == "auto" and kind in ("cpu", "cuda"):
        return f"off by default; {SWITCH}=on enables it"
    why = _unusable(device_type, chosen == "on")
    if why is not None and (kind in _EXPECTED or (chosen == "on" and kind != "cpu")):
        _given_up.setdefault((kind, None), why)
    return why


def remarks() -> list[str]:
    """A sentence for each kind of tensor that Triton should read and does not, for a summary."""
    return [
        (f"{kind} tensors" if dtype is None else f"{str(dtype)[6:]} tensors on {kind}")
        + f" are not read by the Triton kernels: {why}"
        for (kind, dtype), why in _given_up.items()
    ] + [
        f"{kind} tensors are read one by one by the Triton kernels: lists failed there ({why})"
        for kind, why in _lists_given_up.items()
    ]


def try_triton() -> tuple[bool, str]:
    """Compiles a kernel and launches it: True if the kernels read this machine's accelerator, and
    why not. For ``fastcheck doctor``.
    """
    triton_mode()
    accelerator = getattr(torch._C, "_get_accelerator", None)
    device_type = accelerator().type if accelerator is not None else "cpu"
    if device_type == "cpu":
        return False, "torch finds no accelerator for it"
    why = triton_problem(device_type)
    if why is None:
        slots = torch.zeros(1, RECORD_BYTES, dtype=torch.uint8, device=device_type)
        _observe(slots[0, :20].view(torch.float32), slots, 0, int(Depth.FULL))
        why = _given_up.get((_kind(device_type), torch.float32))
    return why is None, why or f"for {_kind(device_type)} tensors"


def triton_backend(device_type: str) -> Backend:
    """The backend of a type of device that has no :func:`triton_problem`."""
    is_known = _kind(device_type) in ("cpu", "cuda", "amd", "xpu")
    return Backend(
        name="triton",
        determinism="sums",
        device_mode=DeviceMode.IEEE if is_known else DeviceMode.UNKNOWN,
        observe=_observe,
        observe_list=_observe_list,
        found_nonfinite=any_nonfinite,
    )


def _kind(device_type: str) -> str:
    """torch calls AMD's GPUs "cuda" too."""
    return "amd" if device_type == "cuda" and torch.version.hip else device_type


@functools.cache
def _unusable(device_type: str, may_interpret: bool) -> Optional[str]:
    try:
        triton: Any = importlib.import_module("triton")
        if may_interpret and os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
            return None
        backend = str(triton.runtime.driver.active.get_current_target().backend)
    except ModuleNotFoundError as error:
        return f"{error.name} is not installed"
    except Exception as error:  # drivers fail in ways of their own
        return f"triton finds no device ({type(error).__name__}: {first_line(error)})"
    wanted = {"amd": "hip"}.get(_kind(device_type), device_type)
    return None if backend == wanted else f"the triton that is installed is for {backend}"


def _observe(
    tensor: torch.Tensor, slots: torch.Tensor, index: int, depth: int, *, logical: bool = False
) -> None:
    """portable.observe() in one launch, or two, or a few for a tensor above 1 GiB."""
    if _launched(tensor, slots, index, depth, logical):
        return
    portable.observe(tensor, slots, index, depth, logical=logical)


def _observe_list(
    tensors: Sequence[torch.Tensor],
    slots: torch.Tensor,
    first: int,
    depth: int,
    *,
    logical: bool = False,
) -> None:
    """portable.observe_list() in two launches for each dtype. What a list has no place for is read
    tensor by tensor.
    """
    done = _listed(tensors, slots[first:], depth, logical)
    for place, tensor in enumerate(tensors):
        if place not in done:
            _observe(tensor, slots, first + place, depth, logical=logical)


def _listed(
    tensors: Sequence[torch.Tensor], slots: torch.Tensor, depth: int, logical: bool
) -> set[int]:
    """Reads what it can as lists; returns the places of that."""
    kind = _kind(slots.device.type)
    done: set[int] = set()
    if len(tensors) < 2 or kind in _lists_given_up:
        return done
    try:
        from . import launch

        target = launch.target_of(slots.device)
        if not target.takes_lists:
            return done
        from . import lists

        groups: dict[torch.dtype, list[tuple[int, Traversal]]] = {}
        for place, tensor in enumerate(tensors):
            if launch.reads(tensor.dtype) and (kind, tensor.dtype) not in _given_up:
                x = traverse(tensor, logical)
                if lists.takes(x):
                    groups.setdefault(tensor.dtype, []).append((place, x))
        for group in groups.values():
            if len(group) > 1:
                places, xs = zip(*group)
                lists.launch_records(xs, places, slots, depth, target)
                done.update(places)
    except Exception as error:  # compilers of any vendor raise errors of their own
        if "out of memory" in str(error):
            raise
        _lists_given_up[kind] = f"{type(error).__name__}: {first_line(error)}"
    return done


def _launched(
    tensor: torch.Tensor, slots: torch.Tensor, index: int, depth: int, logical: bool
) -> bool:
    """False where the portable backend is to read ``tensor``."""
    key = _kind(tensor.device.type), tensor.dtype
    if key in _given_up:
        return False
    try:
        from . import launch

        if not launch.reads(tensor.dtype):
            return False
        target = launch.target_of(tensor.device)
        launch.launch_record(tensor, slots, index, depth, target, logical=logical)
    except Exception as error:  # compilers of any vendor raise errors of their own
        if "out of memory" in str(error):
            raise
        _given_up[key] = f"they failed there ({type(error).__name__}: {first_line(error)})"
        return False
    return True
