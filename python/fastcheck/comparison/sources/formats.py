"""Detects the format of a checkpoint file from its first bytes, or else from its name."""

from __future__ import annotations

import os
import re
import zipfile
from typing import Optional

from fastcheck.utils.reading import open_regular

#: Suffixes of checkpoint files. Others are recognised by their content too.
SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".pt.tar", ".pth.tar", ".safetensors", ".npy", ".npz")
_BY_SUFFIX = {".safetensors": "safetensors", ".npy": "npy", ".npz": "npz"}

_NPY = b"\x93NUMPY"
# torch.save(..., _use_new_zipfile_serialization=False): a pickle of its magic number.
_LEGACY_TORCH = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
_MAX_MEMBERS = 1 << 20


def format_of(path: str) -> Optional[str]:
    """``torch``, ``safetensors``, ``npy``, ``npz`` or ``mindspore``; None: no checkpoint.

    Raises:
        OSError: it is no regular file, or can't be read.
    """
    with open_regular(path) as file:
        start = file.read(512)
        size = os.fstat(file.fileno()).st_size
    kind: Optional[str] = None
    if start.startswith(_NPY):
        kind = "npy"
    elif start.startswith(_LEGACY_TORCH):
        kind = "torch"
    elif start.startswith(b"PK\x03\x04"):
        kind = _of_archive(path)
    elif start[8:9] == b"{" and int.from_bytes(start[:8], "little") <= size - 8:
        kind = "safetensors"
    elif _is_mindspore(start):
        kind = "mindspore"
    if kind is None and path.endswith(SUFFIXES):
        kind = _BY_SUFFIX.get(os.path.splitext(path)[1], "torch")
    return kind


def _of_archive(path: str) -> Optional[str]:
    # A shard of torch.distributed.checkpoint is a row of archives; the last archive is not the
    # whole.
    if path.endswith(".distcp"):
        return None
    try:
        with open_regular(path) as file, zipfile.ZipFile(file) as archive:
            names = archive.namelist()[:_MAX_MEMBERS]
    except Exception:  # damaged: its format can then not be read
        return None
    if any(name.endswith("/data.pkl") for name in names):
        return "torch"
    return "npz" if names and all(name.endswith(".npy") for name in names) else None


def _is_mindspore(start: bytes) -> bool:
    """True if a file begins as mindspore.save_checkpoint() writes it: a protobuf message whose
    first field (``0A``, length) is a message that begins with a name (``0A``, length, text) and
    goes on with a tensor (``12``). https://gitee.com/mindspore/mindspore, checkpoint.proto
    """
    head = re.match(rb"\x0a[\x80-\xff]{,10}[^\x80-\xff]\x0a([^\0\x80-\xff])", start, re.DOTALL)
    if head is None:
        return False
    name = start[head.end() : head.end() + head[1][0] + 1]
    is_name = name.isascii() and name[:-1].decode().isprintable()
    return is_name and len(name) == head[1][0] + 1 and name.endswith(b"\x12")
