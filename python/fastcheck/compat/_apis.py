"""Numbers the calls of torch's Python API while a model is watched, as a Dumper numbers them, so
that the name of an overflow is the name in a list.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from .._api_names import intern_call
from .._compat import is_compiling
from .._extension import extension
from ..dump.api_calls import api_of
from ..dump.records import is_quiet

__all__ = ["ApiNumbers"]


class ApiNumbers(TorchFunctionMode):
    """On the stack of the thread that open()s it, until close(). What an API calls inside is part
    of it and has no number.
    """

    def __init__(self) -> None:
        super().__init__()
        self._counts: Counter[str] = Counter()
        self._observer = extension.op_observer()
        self._is_on = False

    def open(self) -> None:
        """From now on calls are numbered."""
        self._is_on = True
        self.__enter__()  # type: ignore[no-untyped-call]  # torch has no types

    def close(self) -> None:
        """No longer. Under another mode it stays on the stack, and does nothing. Idempotent."""
        if self._is_on:
            self._is_on = False
            depth = torch._C._len_torch_function_stack()
            if depth and torch._C._get_function_stack_at(depth - 1) is self:
                self.__exit__(None, None, None)

    def reset(self) -> None:
        """A step begins: numbers start from 0 again."""
        self._counts.clear()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # torch.compile traces this too, and has to find nothing in it.
        if is_compiling() or not self._is_on or is_quiet():
            return func(*args, **kwargs)
        name = api_of(func)
        if not name:
            return func(*args, **kwargs)
        call = self._counts[name]
        self._counts[name] = call + 1
        self._observer.set_api(intern_call(name, call))
        try:
            return func(*args, **kwargs)
        finally:
            self._observer.set_api(-1)
