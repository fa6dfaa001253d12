"""HookRecorder, the interface of the C++ recorder of module hooks."""

from __future__ import annotations

import threading
from typing import Any, Callable, Optional

import numpy as np
import torch

from fastcheck.extension import compiled
from fastcheck.ring.host import Cursor, HookReader

from .module_calls import ModuleNode, ModuleRecorder


class HookRecorder:
    """Records the calls inside a pass, and gradients, of a session, from open() until close(); all
    that it does not record comes to the ModuleObserver. The caller holds the session's lock. This
    recorder never records: that of the extension does.
    """

    def attach(
        self,
        observer: Callable[[], Optional[object]],
        local: object,
        due: list[Any],
        inner_input: type[tuple[Any, ...]],
        output: type[tuple[Any, ...]],
        gradient: type[tuple[Any, ...]],
        /,
    ) -> None:
        """``observer``: a weak reference to the ModuleObserver; ``local.stack``: the calls that are
        running in a thread; ``due``: the ledger's; and the classes of three kinds of entries.
        """

    def open(
        self,
        step: int,
        add_call: Callable[[Any], None],
        findings: list[Any],
        entries: Optional[list[Any]],
        gradients: dict[int, int],
        after_gap: bool,
        gradient_flags: int,
        /,
    ) -> None:
        """Starts to record. ``entries``: the journal, where the drain brings the records."""

    def close(self) -> None:
        """The recorder stops: the next hook runs in Python."""

    def rest(self) -> None:
        """Leaves out the calls of inner modules in this thread, until close() or open()."""

    def redirect(self, entries: list[Any], /) -> None:
        """Makes later readings go to this journal."""

    def settle(self) -> None:
        """Ends the recorder: Session.settle_call() follows what it is recording; it never opens
        again.
        """

    def set_target(
        self,
        observe: Callable[..., None],
        slots: torch.Tensor,
        identities: np.ndarray,
        cursor: Cursor,
        /,
    ) -> None:
        """A record of the stream that the reader saw last goes to row ``cursor.slot``, if there is
        such a row.
        """

    def clear_target(self) -> None:
        """The rows are no longer the recorder's."""

    def let_wait(self, device_type: Optional[str], /) -> None:
        """Lets small tensors of such devices wait for each other (csrc/torch/read/waiting.h).
        None: no tensor waits any longer.
        """

    def read_waiting(self) -> None:
        """Calls ``ModuleLevel.read_waiting()`` if a tensor waits to be read."""

    def has_passed(self, tensor: torch.Tensor, site: int, /) -> bool:
        """True if this tensor may wait, and the site has passed its trial."""
        return False

    def compared(self, site: int, are_same: bool, /) -> None:
        """A tensor of this site was read a second time, and has the same record or not."""


def make_lock() -> Any:
    """A threading.RLock, or the extension's twin of it, which its recorder can take."""
    module = compiled()
    return threading.RLock() if module is None else module.SessionLock()


def make_recorder(reader: HookReader, cursor: Cursor, lock: Any) -> HookRecorder:
    """A recorder that reads through ``reader``, and takes ``lock`` while it does."""
    module = compiled()
    if module is None:
        return HookRecorder()
    return module.HookRecorder(reader, cursor, lock)


def make_module_recorder(recorder: HookRecorder, node: ModuleNode) -> Optional[ModuleRecorder]:
    """A recorder of one module's hooks; None where nothing is ever recorded."""
    module = compiled()
    if module is None:
        return None
    return module.ModuleRecorder(
        recorder,
        node,
        node.counter,
        *(node.numbers[role] for role in ("input", "output", "grad_input", "grad_output")),
    )
