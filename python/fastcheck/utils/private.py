"""Makes files and folders that their owner alone can read: they hold values of a run."""

from __future__ import annotations

import os
from typing import BinaryIO

__all__ = ["FILE_MODE", "create_private", "make_private_folders"]

#: The umask may take more away.
FILE_MODE = 0o600


def create_private(path: str) -> BinaryIO:
    """Opens the file for writing, emptied if it was there."""
    return open(path, "wb", opener=lambda path, flags: os.open(path, flags, FILE_MODE))


def make_private_folders(path: str) -> None:
    """Makes the folder and those above it; one that is there already keeps its mode."""
    above = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(above):
        make_private_folders(above)
    # Another process may make it meanwhile.
    os.makedirs(path, 0o700, exist_ok=True)
