"""Makes files and folders that their owner alone can read: they hold values of a run.

Every file is opened for writing here. Others may be able to write where a run writes: what they
have put in a file's place is not written through, and not waited for.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from typing import BinaryIO

#: The umask may take more away.
FILE_MODE = 0o600
_FLAGS = os.O_CREAT | getattr(os, "O_BINARY", 0) | getattr(os, "O_NOFOLLOW", 0)


def create_private(path: str, mode: int = FILE_MODE) -> BinaryIO:
    """A new file to write, in place of what was there; see new_file()."""
    return os.fdopen(new_file(path, mode), "wb")


def new_file(path: str, mode: int = FILE_MODE) -> int:
    """The descriptor of a new file, to read and write. A file, a link or a FIFO of this name is
    deleted, and not what it leads to.

    Raises:
        OSError: a folder has this name, or the file can't be created.
    """
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    return os.open(path, _FLAGS | os.O_RDWR | os.O_EXCL, mode)


def open_to_append(path: str) -> int:
    """The descriptor of a regular file to append to, made if it is not there. Never blocks.

    Raises:
        OSError: it is a link, a FIFO or a device, or it can't be opened.
    """
    flags = os.O_WRONLY | os.O_APPEND | getattr(os, "O_NONBLOCK", 0)
    descriptor = os.open(path, _FLAGS | flags, FILE_MODE)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "not a regular file", path)


def make_private_folders(path: str) -> None:
    """Makes the folder and those above it; one that is there already keeps its mode."""
    above = os.path.dirname(path.rstrip(os.sep))
    if above and not os.path.lexists(above):
        make_private_folders(above)
    # Another process may make it meanwhile.
    os.makedirs(path, 0o700, exist_ok=True)
