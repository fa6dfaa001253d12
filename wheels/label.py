"""The version of a build. A wheel's version has a local label that names the torch it fits.

The environment variable ``FASTCHECK_ACCELERATOR`` chooses the kind of wheel and its label:

===========  ================  ====================================================================
cpu          ``+pt213.cpu``    built against torch 2.13, without CUDA kernels
cuda         ``+pt213.cu13``   with CUDA kernels, by nvcc of CUDA 13
cpu-any      ``+cpu``          the kernels alone, for any torch and any Python from 3.9 on
cuda-any     ``+cu13``         with CUDA kernels
generic      ``+generic``      pure Python: any torch, any accelerator
===========  ================  ====================================================================

Without it, and for the source distribution, there is no label: a build that is installed where it
was made needs none. pyproject.toml names this file as the version's provider.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Optional

VARIABLE = "FASTCHECK_ACCELERATOR"
ACCELERATORS = ("cpu", "cuda", "cpu-any", "cuda-any", "generic")
VERSION_FILE = Path("python", "fastcheck", "_version.py")

_state = "wheel"


def build_state(state: str) -> None:
    """Called by the build backend before it reads the version."""
    global _state
    _state = state


def dynamic_metadata(_settings: Mapping[str, Any], _project: Mapping[str, Any]) -> dict[str, str]:
    """The version, for the build backend."""
    accelerator = None if _state == "sdist" else os.environ.get(VARIABLE)
    return {"version": version() + label(accelerator)}


def version() -> str:
    """The source tree's, without a label."""
    found = re.search(r'^__version__ = "(.+)"$', VERSION_FILE.read_text("utf-8"), re.MULTILINE)
    if found is None:
        raise ValueError(f'expected a line __version__ = "..." in {VERSION_FILE}, found none')
    return found[1]


def label(accelerator: Optional[str]) -> str:
    """``+pt213.cpu`` and the like; empty for None or an empty string.

    Raises:
        ValueError: an unknown accelerator.
        RuntimeError: no torch to build against, or no nvcc.
    """
    if not accelerator:
        return ""
    if accelerator not in ACCELERATORS:
        raise ValueError(
            f"{VARIABLE} is {accelerator!r}; expected one of {', '.join(ACCELERATORS)}, or unset"
        )
    if accelerator == "generic":
        return "+generic"
    kind, _, is_for_any_torch = accelerator.partition("-")
    torch = "" if is_for_any_torch else f"pt{torch_release()}."
    return f"+{torch}{'cpu' if kind == 'cpu' else f'cu{_cuda_major()}'}"


def torch_release() -> str:
    """``213`` for torch 2.13.0: its C++ interface holds within a minor release."""
    try:
        import torch
    except ModuleNotFoundError as error:
        raise RuntimeError(
            "a wheel with compiled kernels is built against the torch that is installed, and there "
            "is none; install torch first and build without isolation"
        ) from error
    return "".join(torch.__version__.split("+")[0].split(".")[:2])


def _cuda_major() -> str:
    """``13`` for nvcc of CUDA 13.0, the nvcc that CMake uses."""
    nvcc = os.environ.get("CUDACXX") or shutil.which("nvcc")
    if nvcc is None:
        raise RuntimeError(
            "a wheel with CUDA kernels needs nvcc, and there is none in PATH; "
            "CUDACXX=/path/to/nvcc names one"
        )
    output = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"release (\d+)\.", output)
    if found is None:
        raise RuntimeError(f"expected a release number from {nvcc} --version, got {output!r}")
    return found[1]
