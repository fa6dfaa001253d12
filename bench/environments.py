"""Virtual environments for the tools that fastcheck is compared with, outside the repository.

torch is installed first, from the same index as in the Makefile (``TORCH_INDEX_URL``); later
packages are installed so that they can't replace it.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

import harness
from pure_read import cache_dir


@dataclass(frozen=True)
class Environment:
    """``packages`` may depend on torch, if the installed one satisfies them. ``alone`` is installed
    without its dependencies, which ``packages`` has to list.
    """

    name: str
    packages: tuple[str, ...]
    alone: tuple[str, ...] = ()


TRANSFORMERS = Environment("transformers", ("numpy", "transformers"))
MSPROBE = Environment(
    "msprobe",
    (
        *("einops", "matplotlib", "numpy", "openpyxl", "packaging", "pandas", "psutil", "pytz"),
        *("pyyaml", "tensorboard", "tqdm", "wheel"),
    ),
    alone=("mindstudio-probe==26.2.0",),  # all but skl2onnx, which statistics do not need
)
NVDISASM = Environment("nvdisasm", (), alone=("nvidia-cuda-nvdisasm",))


class MissingToolError(RuntimeError):
    """A tool that this Python lacks, in a smoke run, which installs nothing."""


def python(environment: Environment) -> str:
    """The Python of the environment; in a smoke run the one that runs it, which has to have the
    module of the environment's name.
    """
    if not harness.IS_SMOKE:
        return str(make(environment))
    if importlib.util.find_spec(environment.name) is None:
        raise MissingToolError(f"{environment.name} is not installed")
    return sys.executable


def make(environment: Environment, torch: Optional[str] = "torch==2.13.0") -> Path:
    """Creates the environment if it does not exist, and returns its Python."""
    where = cache_dir() / environment.name
    python = where / "bin" / "python"
    done = where / ".complete"
    if done.exists():
        return python
    print(f"making the environment {where}", file=sys.stderr)
    subprocess.run([sys.executable, "-m", "venv", str(where)], check=True)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    index = os.environ.get("TORCH_INDEX_URL")
    if torch is not None:
        subprocess.run([*pip, torch, *(["--index-url", index] if index else [])], check=True)
    if environment.packages:
        pin = [torch] if torch is not None else []
        subprocess.run([*pip, *pin, *environment.packages], check=True)
    if environment.alone:
        subprocess.run([*pip, "--no-deps", *environment.alone], check=True)
    done.touch()
    return python
