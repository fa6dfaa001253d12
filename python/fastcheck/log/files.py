"""Append-only files that hold whole records or lines after a crash and on a full disk."""

from __future__ import annotations

import errno
import os
from typing import Any

from fastcheck.utils.private import open_to_append


def write_all(descriptor: int, data: Any) -> None:
    """Writes all bytes of ``data``, a bytes-like object.

    Raises:
        OSError: the disk is full. An almost full one takes a part; the next call then raises.
    """
    view = memoryview(data).cast("B")
    while view:
        view = view[os.write(descriptor, view) :]


class OwnDescriptor:
    """The descriptor of a file that stays open. A program may close descriptors that are not its
    own (``os.closerange`` before it starts a daemon), and the number is then given to its next
    file: that one is neither written nor closed.
    """

    def __init__(self, number: int, path: str) -> None:
        self._path = path
        self._number = number
        self._file = self._status()

    def number(self) -> int:
        """Raises OSError with the path where it was closed."""
        if not self._is_own():
            raise OSError(errno.EBADF, "its descriptor was closed by the program", self._path)
        return self._number

    def close(self) -> None:
        """Idempotent."""
        if self._is_own():
            os.close(self._number)
        self._number = -1

    def _is_own(self) -> bool:
        try:
            return self._number >= 0 and self._status() == self._file
        except OSError:  # closed, and the number is no file's now
            return False

    def _status(self) -> tuple[int, int]:
        status = os.fstat(self._number)
        return status.st_dev, status.st_ino


class AppendFile:
    """A file that grows by whole records or lines, one ``os.write`` each time."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._descriptor = OwnDescriptor(open_to_append(path), path)

    def append(self, data: Any) -> None:
        """Writes all of ``data``, or restores the file's size and raises OSError with the path:
        half a record would shift every record behind it.
        """
        descriptor = self._descriptor.number()
        before = os.fstat(descriptor).st_size
        try:
            write_all(descriptor, data)
        except OSError as error:
            error.filename = self.path
            os.ftruncate(descriptor, before)
            raise

    def sync(self) -> None:
        """Waits until the disk has what was written."""
        os.fsync(self._descriptor.number())

    def close(self) -> None:
        """Idempotent."""
        self._descriptor.close()
