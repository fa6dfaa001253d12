"""Makes files and folders that their owner alone can read: they hold values of a run. Files that
grow hold whole records or lines after a crash and on a full disk. Cuts credentials out of what is
recorded.

Every file is opened for writing here. Others may be able to write where a run writes: what they
have put in a file's place is not written through, and not waited for.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Iterator
from typing import Any, BinaryIO

from fastcheck.errors import FastcheckError

# The short words are also parts of other words (`PASSES` of a compiler, `PATH`): they count alone.
_SECRET = (
    r"(?:TOKEN|KEY|SECRET|PASSW|PASSPHRASE|PWD|CREDENTIAL|CREDS|AUTH|BEARER|COOKIE|PRIVATE|SIGNATURE"
    r"|(?<![A-Z])(?:PASS|PAT|PW|SAS|SIG)(?![A-Z]))"
)
_NAME = re.compile(_SECRET, re.IGNORECASE)
# Up to the last @ before the host's end (RFC 3986, 3.2.1); a password that should have been quoted
# may hold a slash, where a port can't be meant.
_USER = re.compile(r"(?<=://)(?:[^\s/?#]*@|[^\s/?#:@]*:(?!\d+(?:[/?#]|$))\S*@)")
# `name=value` as in a URL's query or a connection string, `--name value`, `Name: Bearer value`.
_VALUE = re.compile(
    rf"([\w.-]*{_SECRET}[\w.-]*(?:\s*=\s*|:\s+)|--[\w-]*{_SECRET}[\w-]*\s+)"
    r"(?:(?:Bearer|Basic)\s+)?[^\s&;,]+",
    re.IGNORECASE,
)


@contextlib.contextmanager
def writing(path: str, what: str, kind: type[FastcheckError]) -> Iterator[None]:
    """Raises an error of this kind, which says that ``what`` can't be written, in place of an
    OSError.
    """
    try:
        yield
    except OSError as error:
        raise kind(
            f"{what} can't be written",
            expected="a file that can be created, and room for it",
            got=f"{path}: {error.strerror or error}",
        ) from error


def is_secret_name(name: str) -> bool:
    """True if a variable of this name may hold a secret."""
    return _NAME.search(name) is not None


def without_credentials(text: str) -> str:
    """``text`` with URLs that have no user and password, and ``***`` for what its names call a
    secret.
    """
    return _VALUE.sub(r"\1***", _USER.sub("", text))


#: The umask may take more away.
FILE_MODE = 0o600
_FLAGS = os.O_CREAT | getattr(os, "O_BINARY", 0) | getattr(os, "O_NOFOLLOW", 0)


def create_private(path: str, mode: int = FILE_MODE) -> BinaryIO:
    """Opens a new file for writing, replacing an existing file; see new_file()."""
    return os.fdopen(new_file(path, mode), "wb")


def write_private(path: str, data: bytes, mode: int = FILE_MODE) -> None:
    """Writes a file as a whole: a reader sees the old file or the new file."""
    with replacing(path) as part, create_private(part, mode) as file:
        file.write(data)


@contextlib.contextmanager
def replacing(path: str) -> Iterator[str]:
    """Gives the name to write a file under, which takes the file's place once it is whole."""
    part = f"{path}.{os.getpid()}.part"
    try:
        yield part
        os.replace(part, path)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(part)


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
    """Makes the folder and those above it; a folder that is there already keeps its mode."""
    above = os.path.dirname(path.rstrip(os.sep))
    if above and not os.path.lexists(above):
        make_private_folders(above)
    # Another process may make it meanwhile.
    os.makedirs(path, 0o700, exist_ok=True)


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
    file: that file is neither written nor closed.
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
        """Waits until the disk has everything that was written."""
        os.fsync(self._descriptor.number())

    def close(self) -> None:
        """Idempotent."""
        self._descriptor.close()
