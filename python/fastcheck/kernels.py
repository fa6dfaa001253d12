"""Loads the compiled kernels, or gives the reason why they can't be loaded.

They include no torch: one build serves every torch and every Python. Without them the portable
backend reads tensors of every device, in pure Python.

``FASTCHECK_NO_EXTENSION=1`` in the environment, read at import, makes fastcheck behave as if
nothing compiled were installed (``0`` and empty: no effect). For tests, and to find out
whether a difference comes from a compiled kernel.
"""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Optional

from .errors import ConfigError, ExtensionError, FastcheckError

_SWITCH = "FASTCHECK_NO_EXTENSION"
PORTABLE = "pure Python: portable backend"


@dataclass(frozen=True)
class KernelStatus:
    """``module`` is the module of the kernels, or None with the reason in ``problem``.

    ``accelerator`` and ``compiler`` describe the build of installed kernels, usable or not; None
    when none are installed. ``cuda_archs`` are the compute capabilities of the CUDA kernels in use.
    ``label`` is the local label of the wheel that was installed (``pt213.cpu``, ``cpu``,
    ``generic``), empty where fastcheck was built here. ``torch_version`` is that of the torch which
    the hooks beside the kernels were built for (``extension.py``), None where there are none.
    """

    module: Optional[ModuleType]
    problem: str
    accelerator: Optional[str] = None
    compiler: Optional[str] = None
    cuda_archs: str = ""
    label: str = ""
    torch_version: Optional[str] = None
    error: type[FastcheckError] = ExtensionError

    @property
    def is_broken(self) -> bool:
        """True if kernels are there that can't be used. None at all are no fault: pure Python."""
        return self.module is None and self.accelerator is not None

    @property
    def is_misconfigured(self) -> bool:
        """True if ``FASTCHECK_CPU_ISA`` names a kernel that does not exist."""
        return issubclass(self.error, ConfigError)

    @property
    def text(self) -> str:
        """The code that reads the CPU's tensors, in a few words."""
        if self.module is not None:
            return "compiled, for any torch"
        if self.is_misconfigured:
            return "misconfigured"
        return f"not usable; {PORTABLE}" if self.is_broken else PORTABLE


def _load() -> KernelStatus:
    try:
        info: Any = importlib.import_module("fastcheck._build_info")
    except ModuleNotFoundError:
        info = None
    label = "" if info is None else str(info.VERSION).partition("+")[2]
    if os.environ.get(_SWITCH, "0") not in ("", "0"):
        problem = f"the compiled extension is switched off by {_SWITCH}; unset it to use it"
        return KernelStatus(None, problem, label=label)
    if info is None:
        return KernelStatus(
            None,
            "fastcheck's compiled extension is not installed; build it with "
            "`pip install --no-build-isolation .` from the source tree, torch installed first",
        )
    if info.ACCELERATOR == "none":
        return KernelStatus(
            None,
            "this is fastcheck's generic wheel, which has no compiled extension; install the wheel "
            "for your release of torch and your accelerator, or build from source",
            label=label,
        )
    built = (info.ACCELERATOR, info.COMPILER, info.CUDA_ARCHS, label, info.TORCH_VERSION)
    try:
        module = importlib.import_module("fastcheck._kernels")
        module.cpu_isa()  # reads FASTCHECK_CPU_ISA: a bad value is an error before anything is read
    except ImportError as error:
        return KernelStatus(None, f"fastcheck's compiled kernels do not load: {error}", *built)
    except ValueError as error:
        return KernelStatus(None, str(error), *built, error=ConfigError)
    return KernelStatus(module, "", *built)


status = _load()


def kernels() -> Optional[Any]:
    """The module of the kernels, or None where the portable backend takes its place.

    Raises:
        ConfigError: FASTCHECK_CPU_ISA names a CPU kernel that there isn't; no other kernel takes
            its place.
    """
    if status.module is None and status.is_misconfigured:
        raise status.error(status.problem)
    return status.module
