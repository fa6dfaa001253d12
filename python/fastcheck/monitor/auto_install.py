"""Observes the models of a program without a line in it: installs a monitor on each model when an
optimizer of its parameters is made, or when it is called.
"""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import Any, Callable, Optional

import torch

from fastcheck.errors import FastcheckError, warn
from fastcheck.utils.torch.patching import wrap_method
from fastcheck.utils.torch.versions import is_compiling

from . import ended
from .install import install
from .monitor import Monitor


class AutoInstall:
    """A context. Within it, ``torch.optim.Optimizer.__init__`` is followed by install() on each
    model that holds a parameter of the new optimizer and is not observed yet.

    A model is a module that no other module contains. Modules are found with the garbage collector,
    once for each optimizer. If install() refuses its options for the first model, a FastcheckError
    is raised where the optimizer is made; any other failure is a FastcheckWarning, and the program
    goes on.

    Args:
        at_calls: install() comes before the first call of a model, or of a part of it, too.
        options: those of install().
    """

    def __init__(self, *, at_calls: bool = False, **options: Any) -> None:
        self._at_calls = at_calls
        self._options = options
        self._at_end = ExitStack()
        # install() may make an optimizer, to try a device.
        self._lock = threading.RLock()
        self._observed: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        # The modules that were called or are observed, and all inside them.
        self._met: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        #: The monitors that were installed, in order.
        self.monitors: list[Monitor] = []
        #: An optimizer, or a call, has led to a model.
        self.has_found = False

    def __enter__(self) -> AutoInstall:
        wrap_method(self._at_end, torch.optim.Optimizer, "__init__", self._wrap)
        if self._at_calls:
            wrap_method(self._at_end, torch.nn.Module, "__call__", self._wrap_call)
        return self

    def __exit__(
        self, kind: Optional[type[BaseException]], error: Optional[BaseException], *_: object
    ) -> None:
        """Removes the monitors. Without an exception under way, an exception that remove() raises
        is raised: a stop that the last step made due.
        """
        self._at_end.close()
        first: Optional[Exception] = None
        for monitor in self.monitors[:1]:
            ended.tell(error, monitor._session)
        for monitor in self.monitors:
            try:
                monitor.remove()
            except Exception as error:
                first = first or error
        if first is not None and kind is None:
            raise first

    def _wrap(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def made(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            self._observe(p for group in optimizer.param_groups for p in group["params"])

        return made

    def _wrap_call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def called(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not is_compiling():
                self._observe(self._not_met(module))
            return original(module, *args, **kwargs)

        return called

    def _not_met(self, module: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
        if module not in self._met:
            self._met.update(module.modules())
            yield from module.parameters()

    def _observe(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        try:
            wanted = {id(parameter) for parameter in parameters}
            if not wanted:
                return
            with self._lock:
                for model in _models_of(wanted):
                    if model not in self._observed:
                        self.has_found = True
                        self._observed.add(model)
                        self._met.update(model.modules())
                        self.monitors.append(install(model, **self._options))
        except Exception as error:
            if self._options and isinstance(error, FastcheckError) and not self.monitors:
                raise
            warn(f"a model is not observed: {type(error).__name__}: {error}")


def _models_of(wanted: set[int]) -> list[torch.nn.Module]:
    """The outermost modules that hold one of the parameters, of which these are the ids."""
    holders = [
        module
        for module in gc.get_objects()
        # Not isinstance(): it asks an object for its __class__, which a proxy may compute.
        if issubclass(type(module), torch.nn.Module)
        # A module whose __init__ has not run has no _parameters.
        and "_parameters" in vars(module)
        and any(id(p) in wanted for p in module.parameters())
    ]
    within = {
        id(holder): {id(part) for part in holder.modules()} - {id(holder)} for holder in holders
    }
    inside = set().union(*within.values())
    outermost = [holder for holder in holders if id(holder) not in inside]
    # Without what torch.compile() puts around a part of another of them.
    return [
        holder
        for holder in outermost
        if not within[id(holder)]
        or not any(within[id(holder)] < within[id(other)] for other in outermost)
    ]
