"""APIs of torch that its releases from 2.1 on have under different names, or not at all."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

import torch

__all__ = [
    "GradScaler",
    "autocast_dtype",
    "default_device",
    "eager_stance",
    "is_compiled",
    "is_compiling",
    "is_dynamo_compiling",
    "is_wrapper",
    "unwrap_compiled",
]

if TYPE_CHECKING:
    from torch.amp import GradScaler
    from torch.compiler import is_compiling, is_dynamo_compiling
else:
    # torch.amp's since 2.3, of which CUDA's is then a subclass.
    GradScaler: Any = getattr(torch.amp, "GradScaler", torch.cuda.amp.GradScaler)
    # Since 2.3; before that torch.compile is not served, and nothing needs to be known of it.
    is_compiling: Any = getattr(torch.compiler, "is_compiling", lambda: False)
    is_dynamo_compiling: Any = getattr(torch.compiler, "is_dynamo_compiling", lambda: False)


def default_device() -> AbstractContextManager[Any]:
    """Sets torch's default device within a ``with`` statement: it is suspended within torch's own
    functions, such as backward(), in which a hook may run.
    """
    held: Any = getattr(torch, "_GLOBAL_DEVICE_CONTEXT", None)  # of set_default_device()
    context: Any = getattr(held, "device_context", None)
    return nullcontext() if context is None else torch.device(context.device)


_get_dtype: Any = getattr(torch, "get_autocast_dtype", None)


def autocast_dtype(kind: str) -> str:
    """The dtype of autocast on this kind of device; empty where it is off, or not known."""
    is_enabled: Any = torch.is_autocast_enabled
    try:
        return str(_get_dtype(kind)) if _get_dtype is not None and is_enabled(kind) else ""
    except (RuntimeError, TypeError):  # a device without autocast, an old torch
        return ""


@contextmanager
def eager_stance() -> Iterator[None]:
    """Compiled functions run uncompiled within the block, so that hooks and modes see their modules
    and operators. Does nothing before torch 2.6, or where torch.compile was not used.
    """
    stance: Any = getattr(torch.compiler, "set_stance", None)
    if stance is None or "torch._dynamo" not in sys.modules:
        yield
        return
    with _without_hook_warning(), stance("force_eager"):
        yield


@contextmanager
def _without_hook_warning() -> Iterator[None]:
    """torch warns at each call of a compiled module that global hooks run for its wrapper too;
    fastcheck's hooks skip the wrapper. Not catch_warnings(): at its end it would also remove the
    filters that the user has added within the block.
    """
    before = list(warnings.filters)
    warnings.filterwarnings("ignore", message=r"Using `torch.compile\(module\)` when there are glo")
    added = warnings.filters[0]
    try:
        yield
    finally:
        if added not in before:
            with suppress(ValueError):
                warnings.filters.remove(added)  # type: ignore[attr-defined]  # it is a list


def is_wrapper(module: torch.nn.Module) -> bool:
    """True if it is what torch.compile(module) has put around a module."""
    return type(module).__module__ == "torch._dynamo.eval_frame"


def is_compiled(model: torch.nn.Module) -> bool:
    """True if torch.compile(module) or module.compile() has made a part of it."""
    return any(
        getattr(module, "_compiled_call_impl", None) is not None or is_wrapper(module)
        for module in model.modules()
    )


def unwrap_compiled(module: torch.nn.Module) -> torch.nn.Module:
    """The module that was compiled, of what torch.compile(module) returned; else ``module``."""
    inside = getattr(module, "_orig_mod", module) if is_wrapper(module) else module
    return inside if isinstance(inside, torch.nn.Module) else module
