"""Loads the compiled extension, or gives the reason why it can't be loaded.

It is optional: without it the portable backend reads tensors of every device, in pure Python. Code
with a portable form calls :func:`compiled`; code without one uses ``extension``, whose every
attribute raises :class:`ExtensionError` when it is missing.

``FASTCHECK_NO_EXTENSION=1`` in the environment, read at import, makes fastcheck behave as if the
extension were not installed (``0`` and empty: no effect). For tests, and to find out
whether a difference comes from a compiled kernel.
"""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, Optional

from .errors import ConfigError, ExtensionError, FastcheckError, warn

_SWITCH = "FASTCHECK_NO_EXTENSION"
_PORTABLE = "pure Python: portable backend"


@dataclass(frozen=True)
class Status:
    """``module`` is the extension, or None with the reason in ``problem``.

    ``built_for``, ``accelerator`` and ``compiler`` describe the build of an installed extension,
    usable or not; None when none is installed. ``cuda_archs`` are the compute capabilities of the
    CUDA kernels in use. ``label`` is the local label of the wheel that was installed
    (``pt213.cpu``, ``generic``), empty where fastcheck was built here."""

    module: Optional[ModuleType]
    problem: str
    built_for: Optional[str]
    accelerator: Optional[str]
    compiler: Optional[str]
    error: type[FastcheckError] = ExtensionError
    cuda_archs: str = ""
    label: str = ""

    @property
    def is_broken(self) -> bool:
        """An extension is there and can't be used. None at all is no fault: pure Python."""
        return self.module is None and self.built_for is not None

    @property
    def text(self) -> str:
        """What reads the CPU's tensors, in a few words."""
        if self.module is not None:
            return f"for torch {self.built_for}"
        if issubclass(self.error, ConfigError):
            return f"for torch {self.built_for}, misconfigured"
        kept = f"for torch {self.built_for}, not usable; " if self.is_broken else ""
        return kept + _PORTABLE


def _release(version: str) -> str:
    """``2.13`` of ``2.13.0+cpu``: torch's C++ interface holds within a minor release."""
    return ".".join(version.split("+")[0].split(".")[:2])


def _load() -> Status:
    try:
        info: Any = importlib.import_module("fastcheck._build_info")
    except ModuleNotFoundError:
        info = None
    label = "" if info is None else str(info.VERSION).partition("+")[2]
    if os.environ.get(_SWITCH, "0") not in ("", "0"):
        problem = f"the compiled extension is switched off by {_SWITCH}; unset it to use it"
        return Status(None, problem, None, None, None, label=label)
    if info is None:
        return Status(
            None,
            "fastcheck's compiled extension is not installed; build it with "
            "`pip install --no-build-isolation .` from the source tree, torch installed first",
            None,
            None,
            None,
        )
    if info.TORCH_VERSION is None:
        return Status(
            None,
            "this is fastcheck's generic wheel, which has no compiled extension; install the wheel "
            "for your release of torch and your accelerator, or build from source",
            None,
            None,
            None,
            label=label,
        )
    built = (info.TORCH_VERSION, info.ACCELERATOR, info.COMPILER)
    try:
        import torch
    except ModuleNotFoundError:
        return Status(
            None, "torch is not installed; expected torch " + built[0], *built, label=label
        )
    here, expected = _release(torch.__version__), _release(built[0])
    if here != expected:
        remedy = (
            f"install fastcheck's wheel for torch {here} (+pt{here.replace('.', '')}), or the "
            "generic one,"
            if label
            else "rebuild it with `pip install --no-build-isolation --force-reinstall --no-deps .`,"
        )
        return Status(
            None,
            f"fastcheck's compiled extension was built for torch {built[0]}, and this is torch "
            f"{torch.__version__}; {remedy} or install torch {expected}",
            *built,
            label=label,
        )
    try:
        module = importlib.import_module("fastcheck._C")
        module.cpu_isa()  # reads FASTCHECK_CPU_ISA: a bad value is an error before anything is read
    except ImportError as error:
        problem = f"fastcheck's compiled extension does not load: {error}"
        return Status(None, problem, *built, label=label)
    except ValueError as error:
        return Status(None, str(error), *built, error=ConfigError, label=label)
    return Status(module, "", *built, cuda_archs=info.CUDA_ARCHS, label=label)


status = _load()

if status.is_broken:
    # An installed extension that can't be used; a pure-Python install gives no warning.
    warn(
        status.problem
        if issubclass(status.error, ConfigError)
        else f"{status.problem}. Until then: {_PORTABLE}, which is slower"
    )


def compiled() -> Optional[Any]:
    """The extension, or None where the portable backend takes its place.

    Raises:
        ConfigError: FASTCHECK_CPU_ISA names a CPU kernel that there isn't; no other one takes its
            place.
    """
    if status.module is None and issubclass(status.error, ConfigError):
        raise status.error(status.problem)
    return status.module


class _Missing:
    """Stands in for the extension: any use of it is the one clear error."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # introspection is not use
            raise AttributeError(name)
        raise status.error(status.problem)


if TYPE_CHECKING:
    import fastcheck._C as _C

    extension = _C
else:
    extension = status.module if status.module is not None else _Missing()
