"""Reads files of unknown origin: regular files only, and at most a limit of bytes at once."""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import os
import stat
from collections.abc import Iterator
from typing import Any, BinaryIO, Union

from fastcheck.errors import LogError, did_you_mean

Path = Union[str, "os.PathLike[str]"]

#: Bytes of a JSON document that is read as a whole.
MAX_JSON_BYTES = 1 << 30
# Depth of nested containers: many programs walk through a document by recursion, which is limited.
_MAX_DEPTH = 100
# Bytes of a line of a JSON file with a document in each line.
_MAX_LINE_BYTES = 64 << 20


def why_missing(path: str) -> str:
    """A hint for a path that is not there: the first part of it that is missing, and the names near
    it, or some of those that are beside it.
    """
    if not path:
        return "the path is empty, as from a variable of the shell that is not set"
    part = path.rstrip(os.sep)
    while (folder := os.path.dirname(part)) and not os.path.lexists(folder):
        part = folder
    if os.path.islink(part):
        return f"{part} is a link to {os.readlink(part)}, which is not there"
    try:
        names = sorted(os.listdir(folder or os.curdir))
    except NotADirectoryError:
        return f"{folder} is a file"
    except OSError as error:
        return f"{folder or os.curdir} can't be read: {error.strerror}"
    near = did_you_mean(os.path.basename(part), names)
    plain = [name for name in names if not name.startswith(".")]
    shown = ", ".join(plain[:5]) + (", ..." if len(plain) > 5 else "")
    return f"there is no {part!r}; " + (near or f"beside it: {shown or 'nothing'}")


@contextlib.contextmanager
def reading(what: str = "") -> Iterator[None]:
    """A context: an OSError becomes a LogError that says that ``what`` (by default the file) can't
    be read.
    """
    try:
        yield
    except OSError as error:
        raise LogError(f"{what or error.filename} can't be read: {error.strerror}") from error


def check_regular(path: Path) -> None:
    """Returns if ``path`` is a regular file, or a link to a regular file.

    Raises:
        OSError: it isn't there, or it is a directory, a FIFO, a socket or a device. Reading such a
            thing may block, or never end.
    """
    _check_mode(os.stat(path).st_mode, path)


def open_regular(path: Path) -> BinaryIO:
    """Opens a regular file to read bytes. Never blocks.

    Raises:
        OSError: see check_regular(); or it can't be opened.
    """
    check_regular(path)  # opening a device may already do something to it
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    descriptor = os.open(path, flags)
    try:
        _check_mode(os.fstat(descriptor).st_mode, path)  # replaced in between
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def _check_mode(mode: int, path: Path) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "a directory, where a file is expected", path)
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "not a regular file", path)


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """Pauses Python's cyclic garbage collector: a large file becomes many objects, none of them in
    a cycle, and it would go through all of them again and again.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def parse_json(text: Union[str, bytes]) -> Any:
    """json.loads.

    Raises:
        ValueError: it is not JSON, or it is nested too deeply.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    openers = text.count(b"[") if isinstance(text, bytes) else text.count("[")
    openers += text.count(b"{") if isinstance(text, bytes) else text.count("{")
    if openers < _MAX_DEPTH:
        return value
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(_MAX_DEPTH):
        if not level:
            return value
        parts = (item.values() if isinstance(item, dict) else item for item in level)
        level = [item for part in parts for item in part if isinstance(item, (dict, list))]
    raise ValueError("nested too deeply")


def read_json(path: Path, limit: int = MAX_JSON_BYTES) -> Any:
    """The JSON document in a file.

    Raises:
        OSError: see open_regular().
        ValueError: it is not JSON, or longer than ``limit`` bytes.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise ValueError(f"{size:,} bytes, more than the {limit:,} that are read")
        return parse_json(file.read(size))


def read_json_lines(path: Path) -> Iterator[tuple[Any, int]]:
    """Each line of a file: (its JSON value, 0), or (None, its bytes) where it is no JSON. A line
    of more than 64 MiB is none.

    Raises:
        OSError: see open_regular().
    """
    with open_regular(path) as file:
        while raw := file.readline(_MAX_LINE_BYTES):
            size, is_whole = len(raw), raw.endswith(b"\n") or len(raw) < _MAX_LINE_BYTES
            while not is_whole:
                rest = file.readline(_MAX_LINE_BYTES)
                size += len(rest)
                is_whole = rest.endswith(b"\n") or len(rest) < _MAX_LINE_BYTES
                raw = b""
            try:
                # json would look for the encoding of each line.
                yield parse_json(raw.decode("utf-8", "surrogatepass")), 0
            except ValueError:
                yield None, size
