"""BatchIds: what each step of a run trains on, as the training loop names it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from numbers import Integral
from typing import Any, Callable, Optional, Union

import torch

from fastcheck.errors import ConfigError, explain, first_line

#: The name of a batch.
BatchId = Union[int, str]

_MOST_STEPS = 4096
_MOST_CHARACTERS = 200
# Of a step that has more micro-batches the first and the last are named.
_MOST_SHOWN = 4


class BatchIds:
    """Of one monitor; for any thread. Empty, and without a cost, until the first name is given.

    A name is given before the forward pass, when the step that it opens has not begun yet, or with
    ``monitor.step()``. Of several names of a step (micro-batches) all are kept.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # By step, oldest first: the names, and how many tensors had been read when each was given.
        self._names: OrderedDict[int, list[tuple[BatchId, Optional[int]]]] = OrderedDict()
        #: Called with each step whose name is known or has changed; set by Monitor where it logs.
        self.on_change: Callable[[int, BatchId], None] = lambda step, name: None

    def __bool__(self) -> bool:
        return bool(self._names)

    def add(self, step: int, name: BatchId, seq: Optional[int] = None) -> None:
        """The step trains on ``name``. ``seq``: of the next tensor that is read, where ``step`` is
        only what it seems to belong to: a step whose update the loop leaves out is still open then.
        """
        with self._lock:
            names = self._names.setdefault(step, [])
            if name not in [one for one, _ in names]:
                names.append((name, seq))
            while len(self._names) > _MOST_STEPS:
                self._names.popitem(last=False)
        self._tell(step)

    def ended(self, step: int, last_seq: int) -> None:
        """The step is over, with this tensor as its last: what was named after that is the next
        one's.
        """
        with self._lock:
            names = self._names.get(step, [])
            late = [one for one in names if one[1] is not None and one[1] > last_seq]
            if not late:
                return
            self._names[step] = [one for one in names if one not in late]
            self._names.setdefault(step + 1, []).extend(late)
        self._tell(step + 1)

    def of(self, step: int) -> Optional[BatchId]:
        """The name of a step's batch; several as one text. None: it was given none."""
        with self._lock:
            names = [name for name, _ in self._names.get(step, ())]
        if len(names) < 2:
            return names[0] if names else None
        if len(names) > _MOST_SHOWN:
            return f"{names[0]}, {names[1]}, ..., {names[-1]} ({len(names)} batches)"
        return ", ".join(map(str, names))

    def lines(self) -> list[dict[str, Any]]:
        """As in the log: a step and its batch each, oldest first."""
        with self._lock:
            steps = list(self._names)
        return [{"step": step, "batch": self.of(step)} for step in steps]

    def _tell(self, step: int) -> None:
        name = self.of(step)
        if name is not None:
            self.on_change(step, name)


def batch_name(batch_id: Any) -> BatchId:
    """``batch_id`` as it is kept: an int as it is, anything else as a text of at most 200
    characters.

    Raises:
        ConfigError: a tensor of a device, whose value would have to be waited for.
    """
    if isinstance(batch_id, torch.Tensor):
        if not batch_id.is_cpu or batch_id.numel() > _MOST_CHARACTERS:
            raise ConfigError(
                explain(
                    "batch_id can't be used",
                    expected="an int, a text, or another small object with a short text",
                    got=f"a tensor of {batch_id.numel():,} elements on {batch_id.device}",
                    hint="batch_id=index, with the index that the sampler or the loop counts",
                )
            )
        batch_id = batch_id.tolist()
    if isinstance(batch_id, Integral):  # NumPy's too
        return int(batch_id)
    try:
        text = str(batch_id)
    except Exception as error:  # of the object's own
        text = f"{type(batch_id).__name__}, without a text ({first_line(error)})"
    text = " ".join(text.split())
    return text if len(text) <= _MOST_CHARACTERS else text[: _MOST_CHARACTERS - 3] + "..."
