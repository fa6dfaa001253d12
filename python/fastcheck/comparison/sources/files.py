"""Reads the files of a checkpoint: torch, safetensors and NumPy.

Nothing of a file is executed: torch.load runs with weights_only=True, NumPy without pickles, unless
``trust`` is set. A file may be malicious: a size that it states is compared with what is there
before memory is allocated.
"""

from __future__ import annotations

import contextlib
import functools
import math
import pickle
import tarfile
import weakref
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, BinaryIO, Callable, Optional, Union

import numpy as np
import torch

from fastcheck.dump.storage.files import open_safetensors
from fastcheck.errors import CompareError, first_line
from fastcheck.utils.reading import check_regular, open_regular

from .formats import format_of

#: The name of the tensor in a file that is a single tensor.
LONE = "tensor"
_MAX_DEPTH = 32
# Containers within each other can hold more leaves than the file has bytes.
_MAX_LEAVES = 10_000_000
# An expanded tensor may be larger than what is stored of it; beyond this it is refused.
_MAX_EXPANDED_BYTES = 1 << 30

Loader = Callable[[], torch.Tensor]


class UntrustedError(CompareError):
    """Raised for a file that can only be read by running code that it contains."""

    __module__ = "fastcheck"


def loaders_of(path: str, trust: bool) -> tuple[dict[str, Loader], dict[str, Any]]:
    """The loader of each tensor of a file, by name, and its other values.

    Raises:
        CompareError: the file can't be read. UntrustedError: not without running it.
    """
    try:
        kind = format_of(path)
        if kind == "mindspore":
            raise _of_mindspore(path)
        if kind == "safetensors":
            return _safetensors(path), {}
        if kind == "npy":
            load_array(path)  # so that a damaged file is an error at once
            return {LONE: lambda: load_array(path)}, {}
        if kind == "npz":
            archive = _Archive(path)
            return {name: functools.partial(archive.load, name) for name in archive.members}, {}
        return flatten_checkpoint(load_file(path, trust))
    except CompareError:
        raise
    except Exception as error:  # a damaged file may raise anything
        raise _unreadable(path, error) from error


def _of_mindspore(path: str) -> CompareError:
    return CompareError(
        "this is a checkpoint of MindSpore, which only MindSpore reads",
        expected="a checkpoint of torch, safetensors or NumPy",
        got=path,
        hint="where MindSpore is installed, numpy.savez('model.npz', **{name: p.asnumpy() for "
        f"name, p in mindspore.load_checkpoint({path!r}).items()}}) makes a file that can be "
        'compared, with rename="mindspore" (--rename mindspore)',
    )


def _safetensors(path: str) -> dict[str, Loader]:
    file = open_safetensors(path, "a safetensors file")

    def of(name: str) -> Loader:
        return lambda: file.get_tensor(name)

    return {name: of(name) for name in list(file.keys())}


def load_array(path: str) -> torch.Tensor:
    """The array of a .npy file, mapped.

    Raises:
        ValueError: it holds no numbers; or whatever a damaged file makes NumPy raise.
    """
    check_regular(path)
    return _tensor_of(np.load(path, mmap_mode="c", allow_pickle=False))


class _Archive:
    """The arrays of an .npz, whose list of members is read once and not for each of them."""

    def __init__(self, path: str) -> None:
        file = open_regular(path)
        weakref.finalize(self, file.close)
        self._zip = zipfile.ZipFile(file)
        self.members = {
            member.filename.removesuffix(".npy"): member for member in self._zip.infolist()
        }

    def load(self, name: str) -> torch.Tensor:
        """The array of this name.

        Raises:
            ValueError: it holds no numbers, or more than there is memory for; or whatever a damaged
                file makes NumPy and zlib raise.
        """
        member = self.members[name]
        with self._zip.open(member) as stream:
            _check_header(stream, member.file_size)
        with self._zip.open(member) as stream:
            return _tensor_of(np.lib.format.read_array(stream, allow_pickle=False))


def _check_header(stream: IO[bytes], size: int) -> None:
    """ValueError unless the array's header fits the ``size`` of the whole, and that the memory."""
    version = np.lib.format.read_magic(stream)
    read = {(1, 0): np.lib.format.read_array_header_1_0}.get(
        version, np.lib.format.read_array_header_2_0
    )
    shape, _, dtype = read(stream)
    wanted, held = math.prod(shape) * dtype.itemsize, size - stream.tell()
    if wanted != held:
        raise ValueError(f"its header describes {wanted:,} bytes, and {held:,} are there")
    available = _available_bytes()
    if available is not None and wanted > available:
        raise ValueError(f"{wanted:,} bytes when unpacked, and {available:,} of memory are free")


def _tensor_of(array: Any) -> torch.Tensor:
    if not isinstance(array, np.ndarray):
        raise ValueError("it is not an array")
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if array.dtype.kind == "V" and array.dtype.itemsize == 2:
        # NumPy makes this of ml_dtypes.bfloat16 in a file.
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    if array.dtype.kind not in "fciub":
        raise ValueError(f"an array of {array.dtype}, which holds no numbers")
    if 0 in array.shape:
        array = np.array(array)  # nothing to map
    return torch.from_numpy(array if array.ndim else array.reshape(1)).reshape(array.shape)


def _available_bytes() -> Optional[int]:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        [line] = [line for line in lines if line.startswith("MemAvailable:")]
        return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        return None


def load_file(path: str, trust: bool = False) -> Any:
    """torch.load of a file onto the host, mapped where its format allows. CompareError when it is
    damaged, or holds more than tensors and plain values and isn't trusted.
    """
    last: Exception = ValueError("not read")
    for options in ({"mmap": True}, {}):
        try:
            check_regular(path)
            if trust:
                return torch.load(path, map_location="cpu", weights_only=False, **options)
            return load_restricted(path, **options)
        except UntrustedError:
            raise
        except pickle.UnpicklingError as error:
            # Messages of torch's restricted unpickler about globals and classes, not about damage.
            told = ("GLOBAL", "allowlisted", "must be imported")
            if trust or not any(word in str(error) for word in told):
                raise _unreadable(path, error) from error
            hint = (
                "save the state_dict() alone, or, if you trust where the file comes from, "
                "trust=True (--trust)"
            )
            raise _untrusted(f"{path}: {_culprit(error)}", hint) from error
        except (RuntimeError, ValueError, EOFError, OSError, KeyError, zipfile.BadZipFile) as error:
            last = error
        except Exception as error:  # a damaged pickle may raise anything
            raise _unreadable(path, error) from error
    raise _unreadable(path, last) from last


def load_restricted(source: Union[str, BinaryIO], **options: Any) -> Any:
    """torch.load of a file onto the host, with nothing of it executed.

    Raises:
        UntrustedError: it has a form that torch before 2.6 reads without its restriction.
        Exception: whatever a damaged file makes torch.load raise.
    """
    kind = ""
    opened: dict[str, Any] = {"name" if isinstance(source, str) else "fileobj": source}
    with contextlib.suppress(Exception), tarfile.open(**opened, mode="r:") as archive:
        kind = "a tar archive, as torch before 0.1.10 wrote them" if archive.next() else ""
    with contextlib.suppress(Exception), zipfile.ZipFile(source) as members:
        if any(name.endswith("/constants.pkl") for name in members.namelist()):
            kind = "a TorchScript archive"
    if kind:
        raise _untrusted(kind, "save the state_dict() alone, with a torch of today")
    if not isinstance(source, str):
        source.seek(0)
    return torch.load(source, map_location="cpu", weights_only=True, **options)


def _untrusted(got: str, hint: str) -> UntrustedError:
    what = "loading this file would run code that it brings along"
    expected = "tensors and plain values (torch.load(..., weights_only=True))"
    return UntrustedError(what, expected=expected, got=got, hint=hint)


def _culprit(error: Exception) -> str:
    text = str(error)
    for line in text.splitlines():
        if "Unsupported" in line or "GLOBAL" in line:
            return line.strip()[:200]
    return first_line(error)[:200]


def _unreadable(path: str, error: Exception) -> CompareError:
    reason = getattr(error, "strerror", None) or first_line(error) or type(error).__name__
    if reason.startswith("Weights only load failed"):  # and advice to load it without a check
        reason = "not a whole file of torch's"
    hint = "copy or write the file again"
    with contextlib.suppress(OSError, UnicodeDecodeError), open_regular(path) as file:
        line = file.read(80).decode("ascii").split("\n", 1)[0]
        if line.isprintable():  # a page of an error, or what stands for a large file
            reason = f"text, which begins with {line!r}" if line else "it is empty"
        if line.startswith("version https://git-lfs"):
            hint = "git lfs pull fetches the file, of which this is the pointer"
    return CompareError(
        "this file can't be read",
        expected="a complete checkpoint of torch, safetensors or NumPy",
        got=f"{path}: {reason[:300]}",
        hint=hint,
    )


def flatten_checkpoint(loaded: Any) -> tuple[dict[str, Loader], dict[str, Any]]:
    """The tensors of a (nested) state_dict under dotted names, and its other values.

    Raises:
        ValueError: it has more than 10,000,000 values.
    """
    if isinstance(loaded, torch.Tensor):
        return {LONE: lambda: loaded}, {}
    tensors: dict[str, Loader] = {}
    values: dict[str, Any] = {}
    for count, (path, value) in enumerate(_walk(loaded, ()), 1):
        if count > _MAX_LEAVES:
            raise ValueError(f"it holds more than {_MAX_LEAVES:,} values")
        if isinstance(value, torch.Tensor):
            tensors[".".join(path)] = functools.partial(_checked, value)
        elif isinstance(value, np.ndarray) and value.dtype.kind in "fciub":
            tensors[".".join(path)] = functools.partial(_copied, value)
        elif isinstance(value, (bool, int, float, str)) or value is None:
            values[".".join(path)] = value
    return tensors, values


def _walk(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields the value and all that its containers hold, with the path of each."""
    yield path, value
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    for key, item in items if len(path) < _MAX_DEPTH else ():
        yield from _walk(item, (*path, str(key)))


def _copied(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.array(array))


def _checked(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``; ValueError when it is a small storage, repeated without end by its strides."""
    size = tensor.numel() * tensor.element_size()
    if size > _MAX_EXPANDED_BYTES and tensor.layout is torch.strided:
        held = tensor.untyped_storage().nbytes()
        if size > held:
            raise ValueError(f"{size:,} bytes, of which {held:,} are stored")
    return tensor
