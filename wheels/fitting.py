"""Prints the newest wheel of dist/ that fits this Python, its torch and this source tree.

`make demo` installs it instead of compiling. A wheel fits whose version is the tree's, whose label
names the installed torch's release and accelerator, whose tags this Python takes, and that is no
older than any source file. Prints nothing where there is none.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Optional

import label
from packaging.tags import sys_tags
from packaging.utils import parse_wheel_filename
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]


def fitting(wheels: Iterable[Path], version: str, built_at: float) -> Optional[Path]:
    """The newest of ``wheels`` for this Python with this version, made at ``built_at`` or later."""
    tags = set(sys_tags())
    found = []
    for path in wheels:
        _, its_version, _, its_tags = parse_wheel_filename(path.name)
        made = path.stat().st_mtime
        if its_version == Version(version) and not tags.isdisjoint(its_tags) and made >= built_at:
            found.append((made, path))
    return max(found)[1] if found else None


def sources(root: Path) -> list[Path]:
    """What a wheel is made of."""
    folders = [path for name in ("csrc", "python") for path in (root / name).rglob("*")]
    files = [path for path in folders if path.is_file() and "__pycache__" not in path.parts]
    return [*files, root / "CMakeLists.txt", root / "pyproject.toml"]


def accelerator() -> str:
    """``cpu``, or ``cu13`` where the installed torch is a build for CUDA 13."""
    import torch

    cuda = torch.version.cuda
    return "cpu" if cuda is None else f"cu{cuda.split('.')[0]}"


if __name__ == "__main__":
    wanted = f"{label.version()}+pt{label.torch_release()}.{accelerator()}"
    newest = max(path.stat().st_mtime for path in sources(ROOT))
    wheel = fitting((ROOT / "dist").glob("fastcheck-*.whl"), wanted, newest)
    sys.stdout.write(f"{wheel}\n" if wheel else "")
