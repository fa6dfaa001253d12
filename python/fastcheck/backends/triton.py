"""The Triton kernels as a backend: for devices that have a Triton and no kernel of their own.

Those are Ascend NPUs, Cambricon MLUs and AMD GPUs; NVIDIA GPUs and Triton's interpreter on request.
One source serves all of them (``triton_kernels.py``). What the kernels don't read, and what a
target's compiler refuses, is read by the portable backend: exact in the same fields, so that
nothing but speed tells them apart. triton is imported when the first tensor of such a device is
read.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Sequence
from typing import Any, Optional

import torch

from .._errors import ConfigError, explain, near_matches
from .._record import RECORD_BYTES, Depth, DeviceMode
from . import portable
from .entry import Backend
from .portable_traversal import Traversal, traverse

__all__ = ["SWITCH", "entry", "examine", "mode", "problem", "remarks"]

#: ``auto``: devices without a kernel of their own; ``on``: CUDA too, and with TRITON_INTERPRET=1
#: every device, in Triton's interpreter; ``off``: none. Asked before a device's first tensor.
SWITCH = "FASTCHECK_TRITON"
_MODES = ("auto", "on", "off")

#: Devices that are read by Triton unless something is missing, which is then worth a word.
_EXPECTED = frozenset({"npu", "mlu", "amd"})

#: Why, by kind of device and, where the compiler refused one, dtype.
_given_up: dict[tuple[str, Optional[torch.dtype]], str] = {}
#: The same of kernels for lists, by kind of device: tensors are then read one by one.
_lists_given_up: dict[str, str] = {}


def mode() -> str:
    """What ``FASTCHECK_TRITON`` says.

    Raises:
        ConfigError: something else than auto, on or off.
    """
    said = os.environ.get(SWITCH, "") or "auto"
    if said.lower() not in _MODES:
        near = near_matches(said, _MODES)
        raise ConfigError(
            explain(
                f"{SWITCH} is not understood",
                expected="one of " + ", ".join(_MODES),
                came=repr(said),
                do=f"{SWITCH}={near[0] if near else 'auto'}, or unset it",
            )
        )
    return said.lower()


def problem(device_type: str) -> Optional[str]:
    """Why tensors of this type of device are not read by Triton; None where they are.

    Raises:
        ConfigError: see :func:`mode`.
    """
    chosen, kind = mode(), _kind(device_type)
    if chosen == "off":
        return f"{SWITCH}=off"
    if chosen == "auto" and kind in ("cpu", "cuda"):
        return f"not asked for; {SWITCH}=on asks"
    why = _unusable(device_type, chosen == "on")
    if why is not None and (kind in _EXPECTED or (chosen == "on" and kind != "cpu")):
        _given_up.setdefault((kind, None), why)
    return why


def remarks() -> list[str]:
    """A sentence for each thing that Triton was to read and doesn't, for a summary."""
    return [
        (f"{kind} tensors" if dtype is None else f"{str(dtype)[6:]} tensors on {kind}")
        + f" are not read by the Triton kernels: {why}"
        for (kind, dtype), why in _given_up.items()
    ] + [
        f"{kind} tensors are read one by one by the Triton kernels: lists failed there ({why})"
        for kind, why in _lists_given_up.items()
    ]


def examine() -> tuple[bool, str]:
    """Whether the kernels read this machine's accelerator, and why not: compiles one, and launches
    it. For ``fastcheck doctor``.
    """
    mode()
    asked = getattr(torch._C, "_get_accelerator", None)
    device_type = asked().type if asked is not None else "cpu"
    if device_type == "cpu":
        return False, "torch finds no accelerator that it would read"
    why = problem(device_type)
    if why is None:
        slots = torch.zeros(1, RECORD_BYTES, dtype=torch.uint8, device=device_type)
        _observe(slots[0, :20].view(torch.float32), slots, 0, int(Depth.FULL))
        why = _given_up.get((_kind(device_type), torch.float32))
    return why is None, why or f"for {_kind(device_type)} tensors"


def entry(device_type: str) -> Backend:
    """The table's entry for a type of device that has no :func:`problem`."""
    is_known = _kind(device_type) in ("cpu", "cuda", "amd", "xpu")
    return Backend(
        name="triton",
        is_immediate=device_type == "cpu",
        determinism="sums",
        device_mode=DeviceMode.IEEE if is_known else DeviceMode.UNKNOWN,
        has_host_flag=False,
        observe=_observe,
        observe_list=_observe_list,
        found_nonfinite=portable.found_nonfinite,
        identity=portable.identity,
        observe_list_logical=functools.partial(_observe_list, logical=True),
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
        return f"triton finds no device ({_first_line(error)})"
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
        from . import triton_launch

        target = triton_launch.target_of(slots.device)
        if not target.takes_lists:
            return done
        from . import triton_lists

        groups: dict[torch.dtype, list[tuple[int, Traversal]]] = {}
        for place, tensor in enumerate(tensors):
            if triton_launch.reads(tensor.dtype) and (kind, tensor.dtype) not in _given_up:
                x = traverse(tensor, logical)
                if triton_lists.takes(x):
                    groups.setdefault(tensor.dtype, []).append((place, x))
        for group in groups.values():
            if len(group) > 1:
                places, xs = zip(*group)
                triton_lists.write_records(xs, places, slots, depth, target)
                done.update(places)
    except Exception as error:  # what compilers do, some of which were never at hand
        if "out of memory" in str(error):
            raise
        _lists_given_up[kind] = _first_line(error)
    return done


def _launched(
    tensor: torch.Tensor, slots: torch.Tensor, index: int, depth: int, logical: bool
) -> bool:
    """False where the portable backend is to read ``tensor``."""
    key = _kind(tensor.device.type), tensor.dtype
    if key in _given_up:
        return False
    try:
        from . import triton_launch

        if not triton_launch.reads(tensor.dtype):
            return False
        target = triton_launch.target_of(tensor.device)
        triton_launch.write_record(tensor, slots, index, depth, target, logical=logical)
    except Exception as error:  # what compilers do, some of which were never at hand
        if "out of memory" in str(error):
            raise
        _given_up[key] = f"they failed there ({_first_line(error)})"
        return False
    return True


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}".rstrip(".") if lines else type(error).__name__
