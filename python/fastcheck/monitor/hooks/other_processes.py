"""Models in other processes than that of install(): forked children, and copies that it sent to
processes which it started (``mp.spawn``).

Neither is observed. The first training step of either warns of that.
"""

from __future__ import annotations

import os
import weakref

import torch

from fastcheck.calls.module_calls import ModuleNode
from fastcheck.errors import warn
from fastcheck.monitor.session.session import Session

_followed: weakref.WeakKeyDictionary[Session, list[ModuleNode]] = weakref.WeakKeyDictionary()
_is_registered = False
_has_warned = False


def follow_forks(session: Session, nodes: list[ModuleNode]) -> None:
    """In a forked child the session ends: its hooks do nothing, and its parent's log is left
    alone.
    """
    global _is_registered
    _followed[session] = nodes
    if not _is_registered and hasattr(os, "register_at_fork"):
        _is_registered = True
        os.register_at_fork(after_in_child=_leave_in_child)


def _leave_in_child() -> None:
    # Without any lock: another thread of the parent may have held it.
    for session, nodes in list(_followed.items()):
        if session.removed:
            continue
        session.removed = session.is_forked = True
        for node in nodes:
            node.switch_off()
        log = session.event_store.log
        if log is not None:
            log.failed = True


def warn_of_copy(process: int) -> None:
    """A model that was pickled in ``process`` runs here, in training. Once, and not where this
    process has a monitor of its own.
    """
    global _has_warned
    if _has_warned or process == os.getpid() or not torch.is_grad_enabled():
        return
    if any(not session.removed for session in list(_followed)):
        return
    _has_warned = True
    warn(
        "this model is not observed: fastcheck.install() was called in another process "
        f"({process}) before the model was sent here. Call it in this process (in the function "
        "that mp.spawn runs, or in a hook of the trainer that runs on each rank)"
    )
