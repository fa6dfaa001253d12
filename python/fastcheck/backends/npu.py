"""Huawei's Ascend NPU, through torch_npu: its overflow mode and its overflow status, whichever
kernels read its tensors.

In saturation mode the chip gives the largest finite number where IEEE 754 has an infinity, and 0
where it has a NaN, and sets a status word: a few numbers per device that any operator sets and none
clears. The 910 (Atlas training series) and the 310P have only that mode; the 910B and 910_93 (Atlas
A2 and A3) give Inf and NaN unless INF_NAN_MODE_FORCE_DISABLE=1; the 950 gives them always.
torch_npu sets one device of a process to the mode of ``is_support_inf_nan()``, the device that is
current when it initialises itself, and leaves the others as they are. So each device is queried
through CANN, and torch_npu is the fallback.
Sources: the descriptions of INF_NAN_MODE_ENABLE and of ``npu_get_float_status`` in torch_npu's
documentation, its ``npu_sys_ctrl.cpp``, and ``aclrtFloatOverflowMode`` in CANN's ``acl_rt.h``.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import os
import re
import sys
from collections.abc import Sequence
from typing import Any, Optional

import torch

from fastcheck.backends.portable.formats import FORMATS
from fastcheck.record.format import RECORD_BYTES, Depth, DeviceMode
from fastcheck.utils.torch.own_operators import no_grad

from .backend import Backend, OverflowStatus


def mlu_backend(kernels: Backend, device: torch.device) -> Backend:
    """``kernels``, the backend that reads the tensors of a Cambricon MLU, with its overflow mode.

    No public document specifies how its arithmetic stores a result that is out of range, nor how
    to query the device. NaN and infinities are found by their bits.
    """
    return dataclasses.replace(kernels, device_mode=DeviceMode.UNKNOWN)


#: Chips by torch_npu's name for them. "Ascend910B", without a digit, is one of the first 910s.
_EITHER = re.compile(r"Ascend910(B\d|_93)")
_ALWAYS_IEEE = re.compile(r"Ascend(950|910_95)")
_ALWAYS_SATURATING = re.compile(r"Ascend(910(A|B|ProA|ProB|PremiumA)?|310P\d?)$")

#: Dtypes whose largest number counts as an infinity for the flag that skips an update.
SATURABLE = frozenset({torch.float32, torch.float16, torch.bfloat16})

#: Length of the tensor that npu_get_float_status takes and returns.
_STATUS_NUMBERS = 8

#: Counts of a record, by 64-bit cell: NaN and infinities; saturated components.
_NONFINITE = slice(1, 4)
_SATURATED = 7

#: CANN's runtime, which torch_npu has loaded, and the modes of its aclrtGetDeviceSatMode().
_RUNTIME = "libascendcl.so"
_SAT_MODES = {0: DeviceMode.SATURATING, 1: DeviceMode.IEEE}


def npu_backend(kernels: Backend, device: torch.device) -> Backend:
    """``kernels``, the backend that reads an NPU's tensors, with the NPU's overflow mode and
    status.
    """
    mode = overflow_mode(device)
    if mode is not DeviceMode.SATURATING:
        return dataclasses.replace(kernels, device_mode=mode)
    return dataclasses.replace(
        kernels,
        device_mode=mode,
        found_nonfinite=functools.partial(_found_overflow, kernels),
        overflow_status=_status(),
    )


def overflow_mode(device: torch.device) -> DeviceMode:
    """The way in which ``device`` stores a result that is out of range. Host only."""
    mode = _mode_of_device(device)
    if mode is not None:
        return mode
    utils: Any = getattr(getattr(torch, "npu", None), "utils", None)
    supports_inf_nan = getattr(utils, "is_support_inf_nan", None)
    if supports_inf_nan is None:  # a release before the function
        return _mode_of_chip()
    try:
        return DeviceMode.IEEE if supports_inf_nan() else DeviceMode.SATURATING
    except RuntimeError:  # variables that contradict each other or the chip
        return _mode_of_chip()


def _mode_of_device(device: torch.device) -> Optional[DeviceMode]:
    """The mode that CANN reports; None where it reports none."""
    if "torch_npu" not in sys.modules:
        return None
    module, _ = _modules()
    try:
        get_mode = ctypes.CDLL(_RUNTIME).aclrtGetDeviceSatMode
        reported = ctypes.c_int(-1)
        with module.device(device):  # the query is about the current device of the thread
            status = get_mode(ctypes.byref(reported))
    except (AttributeError, OSError, RuntimeError):  # no such function, no such library, no device
        return None
    return _SAT_MODES.get(reported.value) if status == 0 else None


def _mode_of_chip() -> DeviceMode:
    module: Any = getattr(torch, "npu", None)
    try:
        name = str(module.get_device_name())
    except Exception:  # no such function, no driver
        return DeviceMode.UNKNOWN
    if _ALWAYS_IEEE.match(name):
        return DeviceMode.IEEE
    if _EITHER.match(name):
        is_off = os.environ.get("INF_NAN_MODE_FORCE_DISABLE") == "1"
        return DeviceMode.SATURATING if is_off else DeviceMode.IEEE
    return DeviceMode.SATURATING if _ALWAYS_SATURATING.match(name) else DeviceMode.UNKNOWN


def _found_overflow(kernels: Backend, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """1.0 also where any of them holds its dtype's largest magnitude: an infinity, saturated. By
    the bits: arithmetic on a NaN may give 0 there. No synchronisation.
    """
    floats = [t for t in tensors if FORMATS[t.dtype].is_float and t.numel()]
    if not floats:
        return kernels.found_nonfinite(tensors)
    floats.sort(key=lambda t: t.dtype not in SATURABLE)
    saturable = sum(t.dtype in SATURABLE for t in floats)
    slots = torch.empty(len(floats), RECORD_BYTES, dtype=torch.uint8, device=floats[0].device)
    kernels.observe_list(floats, slots, 0, int(Depth.HEALTH))
    counts = slots.view(torch.int64)
    count = counts[:, _NONFINITE].sum() + counts[:saturable, _SATURATED].sum()
    return count.ne(0).to(torch.float32)


def _status() -> Optional[OverflowStatus]:
    operators: Any = sys.modules.get("torch_npu")
    if hasattr(operators, "npu_get_float_status") and hasattr(operators, "npu_clear_float_status"):
        return OverflowStatus(_read_status, _clear_status)
    return None


def _read_status(device: torch.device) -> torch.Tensor:
    # float32 on a 910, which writes to the tensor it is given; int32 on a 910B. torch_npu looks at
    # the first number, and so does this.
    module, operators = _modules()
    with module.device(device), no_grad():
        return operators.npu_get_float_status(_numbers(device))[:1]


def _clear_status(device: torch.device) -> None:
    module, operators = _modules()
    with module.device(device), no_grad():
        operators.npu_clear_float_status(_numbers(device))


def _modules() -> tuple[Any, Any]:
    module: Any = getattr(torch, "npu", None)
    return module, sys.modules["torch_npu"]


def _numbers(device: torch.device) -> torch.Tensor:
    return torch.zeros(_STATUS_NUMBERS, dtype=torch.float32, device=device)
