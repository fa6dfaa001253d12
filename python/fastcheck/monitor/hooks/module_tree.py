"""ModuleTree: finds modules that were added to a model after install() and have no hooks."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Callable, Optional

import torch
from torch.nn.modules.module import register_module_module_registration_hook

from fastcheck.calls.module_calls import ModuleNode
from fastcheck.utils.torch.patching import Listeners
from fastcheck.utils.torch.versions import unwrap_compiled

_NAMED_MODULES = 5

_handles: list[Any] = []


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
        """From now on nothing is found."""
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
        """What is new since the last call, in one sentence; empty where nothing is."""
        if not self.may_differ:
            return ""
        self.may_differ = False
        found: list[str] = []
        for prefix, reference in self._models:
            model = reference()
            for path, module in () if model is None else model.named_modules():
                if self._knows(module) or unwrap_compiled(module) is not module:
                    continue
                self._known[id(module)] = weakref.ref(module)
                whole = ".".join(part for part in (prefix, path) if part)
                forward = getattr(module.forward, "__func__", None)
                if forward is not torch.nn.Module.forward and self._is_selected(whole):
                    found.append(f"{whole} ({type(module).__name__})")
        if not found:
            return ""
        named = ", ".join(found[:_NAMED_MODULES])
        more = f" and {len(found) - _NAMED_MODULES} more" if len(found) > _NAMED_MODULES else ""
        return (
            f"put into the model after fastcheck.install(), and not observed: {named}{more}. Call "
            "install() when the model is complete"
        )

    def _knows(self, module: torch.nn.Module) -> bool:
        reference = self._known.get(id(module))
        return reference is not None and reference() is module


def _begin() -> None:
    _handles.append(register_module_module_registration_hook(_registered))


def _end() -> None:
    for handle in _handles:
        handle.remove()
    _handles.clear()


def _registered(parent: torch.nn.Module, name: str, child: Optional[torch.nn.Module]) -> None:
    for tree in _trees:
        tree.registered(parent, child)


def look_again() -> None:
    """A module was put in somewhere past torch's hook."""
    for tree in _trees:
        tree.may_differ = True


_trees: Listeners[ModuleTree] = Listeners(_begin, _end)
