"""The modules given to install(): whether they accept hooks, what is called besides them, and
forked processes that train them.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Callable, Optional

import torch
from torch.nn.modules.module import register_module_module_registration_hook

from fastcheck.calls.module_calls import ModuleNode
from fastcheck.errors import ConfigError, warn
from fastcheck.monitor.session.session import Removal, Session
from fastcheck.utils.text.layout import listed
from fastcheck.utils.torch.patching import Listeners
from fastcheck.utils.torch.versions import unwrap_compiled

_NAMED_MODULES = 5


class ModuleTree:
    """The modules that a monitor was given, while it is there.

    Args:
        models: those given to install().
        named: all their modules by path, as they are at install().
        nodes: those that are observed.
        is_selected: whether a module with this path would be observed.
    """

    def __init__(
        self,
        models: Sequence[torch.nn.Module],
        named: Mapping[str, torch.nn.Module],
        nodes: Sequence[ModuleNode],
        is_selected: Callable[[str], bool],
    ) -> None:
        self._paths = {id(module): path for path, module in named.items()}
        self._models = [(self._paths.get(id(model), ""), weakref.ref(model)) for model in models]
        self._known = {id(module): weakref.ref(module) for module in named.values()}
        self._nodes = nodes
        self._is_selected = is_selected
        #: Looked through once in any case: a module may be put in past the hook.
        self.may_differ = True
        _trees.connect(self)

    def close(self) -> None:
        """Ends the search: nothing is found from now on."""
        self.may_differ = False
        _trees.disconnect(self)

    def registered(self, parent: torch.nn.Module, child: Optional[torch.nn.Module]) -> None:
        """``child`` was made a submodule of ``parent``."""
        if child is not None and self._knows(parent) and not self._knows(child):
            self.may_differ = True
            inner = f"{self._paths.get(id(parent), '')}."
            for node in self._nodes:
                if not node.path or inner.startswith(f"{node.path}."):
                    node.has_new_parts = True

    def take_news(self) -> str:
        """A sentence on what is new since the last call; empty if there is nothing."""
        if not self.may_differ:
            return ""
        self.may_differ = False
        names: list[str] = []
        for prefix, reference in self._models:
            model = reference()
            for path, module in () if model is None else model.named_modules():
                if self._knows(module) or unwrap_compiled(module) is not module:
                    continue
                self._known[id(module)] = weakref.ref(module)
                whole = ".".join(part for part in (prefix, path) if part)
                forward = getattr(module.forward, "__func__", None)
                if forward is not torch.nn.Module.forward and self._is_selected(whole):
                    names.append(f"{whole} ({type(module).__name__})")
        if not names:
            return ""
        named = listed(names, _NAMED_MODULES)
        return (
            f"put into the model after fastcheck.install(), and not observed: {named}. Call "
            "install() when the model is complete"
        )

    def _knows(self, module: torch.nn.Module) -> bool:
        reference = self._known.get(id(module))
        return reference is not None and reference() is module


def _begin(at_end: ExitStack) -> None:
    at_end.callback(register_module_module_registration_hook(_registered).remove)


def _registered(parent: torch.nn.Module, name: str, child: Optional[torch.nn.Module]) -> None:
    for tree in _trees:
        tree.registered(parent, child)


def look_again() -> None:
    """A module was put in somewhere past torch's hook."""
    for tree in _trees:
        tree.may_differ = True


_trees: Listeners[ModuleTree] = Listeners(_begin)


_followed: weakref.WeakKeyDictionary[Session, list[ModuleNode]] = weakref.WeakKeyDictionary()
_is_registered = False
_has_warned = False


def follow_forks(session: Session, nodes: list[ModuleNode]) -> None:
    """Ends the session in a forked child: its hooks do nothing, and its parent's log is left
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
        session.removed = Removal.FORKED
        for node in nodes:
            node.switch_off()
        log = session.event_store.archive.log
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


def check_built(model: torch.nn.Module) -> None:
    """ConfigError when a module in the model has not called its ``__init__``."""
    waiting = [model]
    seen: set[int] = set()
    while waiting:
        module = waiting.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        children = getattr(module, "_modules", None)
        if children is None or getattr(module, "_forward_hooks", None) is None:
            raise ConfigError(
                "install() was given a module that is not initialised",
                expected="a torch.nn.Module whose __init__ has run",
                got=f"a {type(module).__name__} without the attributes of one",
                hint="call super().__init__() first in its __init__",
            )
        waiting += [child for child in children.values() if child is not None]


def takes_hooks(module: torch.nn.Module) -> bool:
    """False for a module compiled by torch.jit, whose parameters lie outside of Python."""
    return not isinstance(module, torch.jit.ScriptModule)


def check_hookable(model: torch.nn.Module) -> None:
    """ConfigError when the model itself does not accept hooks."""
    if not takes_hooks(model):
        raise ConfigError(
            "a module compiled by torch.jit can't be observed",
            expected="a model in Python",
            got=f"the model, compiled from {_source_of(model)}",
            hint="install() on the model from which it was compiled",
        )


def unhookable_note(observed: Iterable[tuple[str, torch.nn.Module]]) -> str:
    """A note that names the modules, by path, that do not accept hooks; empty if there are none."""
    descriptions: dict[str, str] = {}
    for path, module in observed:
        if takes_hooks(module):
            continue
        inner = path.split(".")
        outer = {".".join(inner[:count]) for count in range(1, len(inner))}
        if outer.isdisjoint(descriptions):
            descriptions[path] = f"{path} (compiled from {_source_of(module)})"
    named = ", ".join(descriptions.values())
    return named and f"not observed, compiled by torch.jit: {named}"


def _source_of(module: torch.nn.Module) -> str:
    return str(getattr(module, "original_name", type(module).__name__))
