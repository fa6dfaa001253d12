"""Loads the compiled hooks and observers, or gives the reason why they can't be loaded.

They are bound to the release of torch that they were built for, and optional: without them hooks
are Python's, and the kernels (``kernels.py``) read tensors all the same. Code with a portable form
calls :func:`compiled`; code without one uses ``extension``, whose every attribute raises
:class:`ExtensionError` when it is missing.

``FASTCHECK_NO_BINDING=1`` in the environment, read at import, makes fastcheck behave as if they
were not installed (``0`` and empty: no effect).
"""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, Optional

from . import kernels
from .errors import ExtensionError, FastcheckError, warn

_SWITCH = "FASTCHECK_NO_BINDING"
_HOOKS = "hooks in pure Python"


@dataclass(frozen=True)
class ExtensionStatus:
    """``module`` is the extension, or None with the reason in ``problem``. ``built_for`` is the
    torch of an installed extension, usable or not; None when none is installed.
    """

    module: Optional[ModuleType]
    problem: str
    built_for: Optional[str] = None
    error: type[FastcheckError] = ExtensionError

    @property
    def is_broken(self) -> bool:
        """Something compiled is there and can't be used. Nothing at all is no fault."""
        return self.module is None and (self.built_for is not None or kernels.status.is_broken)

    @property
    def text(self) -> str:
        """The code that hooks modules and reads the CPU's tensors, in a few words."""
        if self.module is not None:
            return f"for torch {self.built_for}"
        if kernels.status.is_misconfigured:
            return f"for torch {self.built_for}, misconfigured"
        kept = f"for torch {self.built_for}, not usable; " if self.built_for is not None else ""
        return kept + (kernels.PORTABLE if kernels.status.module is None else _HOOKS)


def _release(version: str) -> str:
    """``2.13`` of ``2.13.0+cpu``: torch's C++ interface holds within a minor release."""
    return ".".join(version.split("+")[0].split(".")[:2])


def _load() -> ExtensionStatus:
    beneath = kernels.status
    built = beneath.torch_version
    if beneath.module is None and built is None:
        return ExtensionStatus(None, beneath.problem, error=beneath.error)
    if os.environ.get(_SWITCH, "0") not in ("", "0"):
        return ExtensionStatus(None, f"the compiled hooks are switched off by {_SWITCH}; unset it")
    if built is None:
        return ExtensionStatus(
            None,
            "this is fastcheck's wheel of kernels for any torch, which has no compiled hooks and "
            "observers; install the wheel for your release of torch, or build from source",
        )
    try:
        import torch
    except ModuleNotFoundError:
        return ExtensionStatus(None, f"torch is not installed; expected torch {built}", built)
    here, expected = _release(torch.__version__), _release(built)
    if here != expected:
        remedy = (
            f"install fastcheck's wheel for torch {here} (+pt{here.replace('.', '')}), or the "
            "one for any torch,"
            if beneath.label
            else "rebuild it with `pip install --no-build-isolation --force-reinstall --no-deps .`,"
        )
        return ExtensionStatus(
            None,
            f"fastcheck's compiled extension was built for torch {built}, and this is torch "
            f"{torch.__version__}; {remedy} or install torch {expected}",
            built,
        )
    if beneath.module is None:
        return ExtensionStatus(None, beneath.problem, built, beneath.error)
    try:
        module = importlib.import_module("fastcheck._C")
    except ImportError as error:
        problem = f"fastcheck's compiled extension does not load: {error}"
        return ExtensionStatus(None, problem, built)
    return ExtensionStatus(module, "", built)


status = _load()

if status.is_broken:
    # An installed extension can't be used; a pure-Python install gives no warning.
    warn(
        status.problem
        if kernels.status.is_misconfigured
        else f"{status.problem}. Until then: {status.text.rpartition('; ')[2]}, which is slower"
    )


def compiled() -> Optional[Any]:
    """The extension, or None where Python takes its place.

    Raises:
        ConfigError: FASTCHECK_CPU_ISA names a CPU kernel that there isn't; no other kernel takes
            its place.
    """
    kernels.kernels()
    return status.module


class _Missing:
    """A stand-in for the missing extension: any use raises the same clear error."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # introspection is not use
            raise AttributeError(name)
        raise status.error(status.problem)


if TYPE_CHECKING:
    import fastcheck._C as _C

    extension = _C
else:
    extension = status.module if status.module is not None else _Missing()
