"""A folder of files that appear whole: on a disk, or on anything that pyarrow.fs reaches."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from typing import Any

from fastcheck.errors import LogError, first_line
from fastcheck.utils.private import create_private, without_credentials
from fastcheck.utils.reading import open_regular

from .schema import need

_TEMPORARY = ".part"


class Folder:
    """Files by their path under ``place``: a directory, or a URL such as ``s3://bucket/fleet``.

    On a disk a file is written under another name, flushed to the disk and renamed; elsewhere it is
    written in one piece, which object stores show when it is complete. Below a folder that is a
    link, files are read, and none is written or deleted. Methods raise LogError where the place
    can't be read or written.
    """

    def __init__(self, place: str | os.PathLike[str]) -> None:
        fs = need("pyarrow.fs")
        self.place = os.fspath(place)
        with self._errors("opened"):
            if "://" in self.place:
                self._system, self._root = fs.FileSystem.from_uri(self.place)
            else:
                self._system, self._root = fs.LocalFileSystem(), os.path.abspath(self.place)
        self.is_local = self._system.type_name == "local"

    def url(self, path: str) -> str:
        """The place that an engine reads: a path on a disk, a URL elsewhere."""
        if self.is_local:
            return os.path.join(self._root, path) if path else self._root
        return f"{self.place.rstrip('/')}/{path}"

    def write(self, path: str, data: Any) -> None:
        """Writes ``data``, a bytes-like object, replacing an existing file."""
        full = self._full(path)
        with self._errors("written", path):
            if not self.is_local:
                with self._system.open_output_stream(full) as stream:
                    stream.write(data)
                return
            self._check_folders(full)
            os.makedirs(os.path.dirname(full), exist_ok=True)
            with create_private(full + _TEMPORARY, 0o666) as file:
                file.write(memoryview(data))
                file.flush()
                os.fsync(file.fileno())
            os.replace(full + _TEMPORARY, full)

    def read(self, path: str) -> bytes | None:
        """The bytes of a file; None where there is none."""
        with self._errors("read", path):
            try:
                if self.is_local:
                    with open_regular(self._full(path)) as file:
                        return file.read()
                with self._system.open_input_stream(self._full(path)) as stream:
                    return stream.read()
            except FileNotFoundError:
                return None

    def open(self, path: str) -> Any:
        """A file to read at any place of it, as an Arrow file."""
        with self._errors("read", path):
            return self._system.open_input_file(self._full(path))

    def dataset(self, paths: list[str]) -> Any:
        """Opens these Parquet files as one Arrow dataset."""
        with self._errors("read"):
            full = [self._full(path) for path in paths]
            return need("pyarrow.dataset").dataset(full, filesystem=self._system, format="parquet")

    def files(self, path: str = "") -> dict[str, int]:
        """All files below ``path``, at any depth, by their path in the folder, with their bytes."""
        fs = need("pyarrow.fs")
        selector = fs.FileSelector(self._full(path), recursive=True, allow_not_found=True)
        with self._errors("read", path):
            infos = self._system.get_file_info(selector)
        start = len(self._root.rstrip("/")) + 1
        return {
            info.path[start:].replace("\\", "/"): info.size
            for info in infos
            if info.type == fs.FileType.File
        }

    def delete(self, path: str) -> None:
        """Deletes a file, if it is there."""
        with self._errors("changed", path), contextlib.suppress(FileNotFoundError):
            self._check_folders(self._full(path))
            self._system.delete_file(self._full(path))

    def _check_folders(self, full: str) -> None:
        """OSError where a folder below the place is a link: what it leads to is not the fleet's."""
        while self.is_local and (full := os.path.dirname(full)) != self._root:
            if os.path.islink(full):
                raise OSError(errno.ENOTDIR, f"{full} is a link")

    def _full(self, path: str) -> str:
        return f"{self._root.rstrip('/')}/{path}" if path else self._root

    @contextlib.contextmanager
    def _errors(self, done: str, path: str = "") -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:
            raise LogError(
                f"a fleet's files can't be {done}",
                expected="a directory, or a URL that pyarrow.fs opens, with room in it",
                got=without_credentials(f"{self.place} {path}".rstrip() + f": {first_line(error)}"),
            ) from error
