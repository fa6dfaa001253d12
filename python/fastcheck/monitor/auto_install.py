"""Observes the models of a program without a line in it: installs a monitor on each model when an
optimizer of its parameters is made.
"""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from typing import Any, Callable, Optional

import torch

from fastcheck.errors import ConfigError, warn
from fastcheck.utils.torch.patching import WrappedMethods

from .install import install
from .monitor import Monitor


class AutoInstall:
    """A context. Within it, ``torch.optim.Optimizer.__init__`` is followed by install() on each
    model that holds a parameter of the new optimizer and is not observed yet.

    A model is a module that no other module contains. Modules are found with the garbage collector,
    once for each optimizer. If install() refuses its options for the first model, ConfigError is
    raised where the optimizer is made; any other failure is a FastcheckWarning, and the program
    goes on.

    Args:
        options: those of install().
    """

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._methods = WrappedMethods()
        self._lock = threading.Lock()
        self._observed: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        #: The monitors that were installed, in order.
        self.monitors: list[Monitor] = []

    def __enter__(self) -> AutoInstall:
        self._methods.wrap(torch.optim.Optimizer, "__init__", self._wrap)
        return self

    def __exit__(self, kind: Optional[type[BaseException]], *_: object) -> None:
        """Removes the monitors. Without an exception under way, one that remove() raises is
        raised: a stop that the last step made due.
        """
        self._methods.restore()
        first: Optional[Exception] = None
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
            try:
                self._observe(optimizer)
            except Exception as error:
                if isinstance(error, ConfigError) and not self.monitors:
                    raise
                warn(f"a model is not observed: {type(error).__name__}: {error}")

        return made

    def _observe(self, optimizer: torch.optim.Optimizer) -> None:
        with self._lock:
            for model in _models_of(optimizer):
                if model not in self._observed:
                    self._observed.add(model)
                    self.monitors.append(install(model, **self._options))


def _models_of(optimizer: torch.optim.Optimizer) -> list[torch.nn.Module]:
    """The outermost modules that hold a parameter of the optimizer."""
    wanted = {id(p) for group in optimizer.param_groups for p in group["params"]}
    holders = [
        module
        for module in gc.get_objects()
        # Not isinstance(): it asks an object for its __class__, which a proxy may compute.
        if issubclass(type(module), torch.nn.Module)
        # A module whose __init__ has not run has no _parameters.
        and "_parameters" in vars(module)
        and any(id(p) in wanted for p in module.parameters())
    ]
    inside = {id(child) for holder in holders for child in holder.modules() if child is not holder}
    return [holder for holder in holders if id(holder) not in inside]
