"""Loads the compiled extension, or says in one sentence why it can't be.

``import fastcheck`` never fails for want of it: logs are read and compared without. What needs it
uses ``extension``, whose every attribute raises :class:`ExtensionError` when it is missing.
"""

from __future__ import annotations

import importlib
import warnings
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, Optional

from ._errors import ConfigError, ExtensionError, FastcheckError, FastcheckWarning


@dataclass(frozen=True)
class Status:
    """``module`` is the extension, or None with the reason in ``problem``."""

    module: Optional[ModuleType]
    problem: str
    built_for: Optional[str]
    accelerator: Optional[str]
    compiler: Optional[str]
    error: type[FastcheckError] = ExtensionError


def _release(version: str) -> str:
    """``2.13`` of ``2.13.0+cpu``: torch's C++ interface holds within a minor release."""
    return ".".join(version.split("+")[0].split(".")[:2])


def _load() -> Status:
    try:
        info = importlib.import_module("fastcheck._build_info")
    except ModuleNotFoundError:
        return Status(
            None,
            "fastcheck's compiled extension is not installed; build it with "
            "`pip install --no-build-isolation .` from the source tree, torch installed first",
            None,
            None,
            None,
        )
    built = (info.TORCH_VERSION, info.ACCELERATOR, info.COMPILER)
    try:
        import torch
    except ModuleNotFoundError:
        return Status(None, "torch is not installed; expected torch " + built[0], *built)
    if _release(torch.__version__) != _release(built[0]):
        return Status(
            None,
            f"fastcheck's compiled extension was built for torch {built[0]}, and this is torch "
            f"{torch.__version__}; rebuild it with `pip install --no-build-isolation "
            f"--force-reinstall --no-deps .`, or install torch {_release(built[0])}",
            *built,
        )
    try:
        module = importlib.import_module("fastcheck._C")
        module.cpu_isa()  # reads FASTCHECK_CPU_ISA: a bad value is an error before anything is read
    except ImportError as error:
        return Status(None, f"fastcheck's compiled extension does not load: {error}", *built)
    except ValueError as error:
        return Status(None, str(error), *built, error=ConfigError)
    return Status(module, "", *built)


status = _load()

if status.module is None and status.built_for is not None:
    # It was installed and is of no use: worth a word at once. A pure-Python install is not.
    warnings.warn(status.problem, FastcheckWarning, stacklevel=2)


class _Missing:
    """Stands in for the extension: any use of it is the one clear error."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # introspection is not use
            raise AttributeError(name)
        raise status.error(status.problem)


if TYPE_CHECKING:
    from . import _C

    extension = _C
else:
    extension = status.module if status.module is not None else _Missing()
