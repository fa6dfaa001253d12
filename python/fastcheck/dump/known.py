"""What a dump has read already, and nothing has written since: its record holds for every operator
that takes it in.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Optional

import numpy as np
import torch

from .._extension import extension
from .._seen import make_seen

__all__ = ["KnownReadings"]

_MOST = 65536


class _Known(NamedTuple):
    seq: int
    probe: int
    record: bytes


class KnownReadings:
    """Tensors of the CPU by storage, place and version. Operators that write to a storage are told
    (``x.data`` has a version of its own); what writes without telling torch shows in a few of the
    tensor's bytes (csrc/torch/probe.h), unless it writes just a few of them.
    """

    def __init__(self) -> None:
        self._seen = make_seen()
        self._known: dict[int, _Known] = {}
        # By the address of a storage: the number of the first reading after it was written to last.
        self._written: dict[int, int] = {}
        # Of the tensor that was looked for last.
        self._token = self._probe = -1

    def find(self, tensor: torch.Tensor, seq: int) -> Optional[bytes]:
        """Its record, if it was read before; else it is to be read now, as number ``seq``, and
        keep() to be called.
        """
        self._token = -1
        probe = extension.probe(tensor)
        if probe is None or tensor.is_inference():
            return None
        if len(self._known) >= _MOST:
            self.clear()
        token = self._seen.add(tensor, seq)
        self._token, self._probe = (seq if token < 0 else token), probe
        known = self._known.get(token)
        if known is None or known.probe != probe:
            return None
        return known.record if known.seq >= self._written.get(_address(tensor), 0) else None

    def keep(self, seq: int, record: np.ndarray) -> None:
        """``record`` is that of the tensor that was not found."""
        if self._token >= 0:
            self._known[self._token] = _Known(seq, self._probe, record.tobytes())

    def wrote(self, tensor: torch.Tensor, seq: int) -> None:
        """An operator has written to it; the next reading is number ``seq``."""
        self._written[_address(tensor)] = seq

    def clear(self) -> None:
        self._seen.clear()
        self._known.clear()
        self._written.clear()


def _address(tensor: torch.Tensor) -> int:
    storage: Any = tensor.untyped_storage()
    return int(storage._cdata)
