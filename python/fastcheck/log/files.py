"""Append-only files that hold whole records or lines after a crash and on a full disk."""

from __future__ import annotations

import os
from typing import Any

from fastcheck.utils.private import FILE_MODE

__all__ = ["AppendFile", "write_all"]


def write_all(descriptor: int, data: Any) -> None:
    """Writes all bytes of ``data``, a bytes-like object.

    Raises:
        OSError: the disk is full. An almost full one takes a part; the next call then raises.
    """
    view = memoryview(data).cast("B")
    while view:
        view = view[os.write(descriptor, view) :]


class AppendFile:
    """A file that grows by whole records or lines, one ``os.write`` each time."""

    def __init__(self, path: str) -> None:
        self.path = path
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0)
        self._descriptor = os.open(path, flags, FILE_MODE)

    def append(self, data: Any) -> None:
        """Writes all of ``data``, or restores the file's size and raises OSError with the path:
        half a record would shift every record behind it.
        """
        before = os.fstat(self._descriptor).st_size
        try:
            write_all(self._descriptor, data)
        except OSError as error:
            error.filename = self.path
            os.ftruncate(self._descriptor, before)
            raise

    def sync(self) -> None:
        """Waits until the disk has what was written."""
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
