"""observe() inside torch.compile: two ops that call the readers at run time, as those of
monitor/hooks/compiled.py call the observers of modules. By then it is known which module runs.
"""

from __future__ import annotations

import threading
from typing import Any, Callable, Optional

import torch

from fastcheck.monitor.hooks.compiled import is_available
from fastcheck.monitor.hooks.traced import Traced

from .reader import NamedGradient

# Readings whose gradients may still come; those of older ones pass unread.
_MAX_READINGS = 16384

_Read = Callable[[str, torch.Tensor, Traced], list[NamedGradient]]

_lock = threading.Lock()
_waiting: dict[int, list[NamedGradient]] = {}
_next_number = 0
_library: Optional[torch.library.Library] = None


def define(read: _Read) -> bool:
    """Has the ops call ``read``, which is the same each time. False where this torch can't."""
    global _library
    if not is_available():
        return False
    if _library is None:
        _library = _defined(read)
    return True


def _defined(read: _Read) -> torch.library.Library:
    from torch._higher_order_ops.effects import _EffectType

    def named_tensor(
        order: torch.Tensor, tensor: torch.Tensor, name: str, bits: int, grad: bool
    ) -> torch.Tensor:
        return _number_of(read(name, tensor, Traced([0], [bits], grad)))

    make: Any = torch.library.Library  # untyped
    library = make("fastcheck", "FRAGMENT")
    # As the ops for modules: a CUDA graph would leave it out.
    tags = [tag for tag in (getattr(torch.Tag, "cudagraph_unsafe", None),) if tag is not None]
    for schema, implementation, fake in (
        (
            "named_tensor(Tensor(a!) order, Tensor tensor, str name, int bits, bool grad) "
            "-> Tensor",
            named_tensor,
            _no_number,
        ),
        ("named_gradient(Tensor number, Tensor gradient) -> ()", _gradient, _nothing),
    ):
        name = library.define(schema, tags=tags)
        library.impl(name, implementation, "CompositeExplicitAutograd")
        library.impl(name, torch.library.fallthrough_kernel, "Autograd")
        torch.library.register_fake(f"fastcheck::{name}", fake, lib=library)
    # It writes nothing, and has to be kept all the same.
    torch.library._register_effectful_op("fastcheck::named_gradient", _EffectType.ORDERED)
    made: torch.library.Library = library
    return made


def _number_of(gradients: list[NamedGradient]) -> torch.Tensor:
    """By which the gradient will find them; -1: none is waited for."""
    global _next_number
    number = -1
    if gradients:
        with _lock:
            number, _next_number = _next_number, _next_number + 1
            _waiting[number] = gradients
            if len(_waiting) > _MAX_READINGS:
                del _waiting[next(iter(_waiting))]
    with torch.inference_mode(False):
        return torch.tensor([number], dtype=torch.int64, device="cpu")


def _gradient(number: torch.Tensor, gradient: torch.Tensor) -> None:
    for found in _waiting.get(int(number), ()):
        found(gradient)


def _no_number(*args: Any) -> torch.Tensor:
    return torch.empty((1,), dtype=torch.int64, device="cpu")


def _nothing(*args: Any) -> None:
    pass
