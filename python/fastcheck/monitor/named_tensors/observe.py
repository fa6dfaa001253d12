"""observe(): reads a tensor of user code under a name. Without a monitor it returns at once."""

from __future__ import annotations

import torch

from fastcheck.errors import ConfigError, explain
from fastcheck.monitor.hooks.compiled import keep_out
from fastcheck.monitor.hooks.module_observer import ModuleObserver, last_pass
from fastcheck.monitor.hooks.traced import Traced, trace_named
from fastcheck.monitor.op_level.hooks import OpModuleObserver
from fastcheck.utils.torch.patching import Listeners
from fastcheck.utils.torch.versions import is_compiling, is_dynamo_compiling

from .compiled import define
from .op_reader import OpNamedTensors
from .reader import NamedGradient, NamedTensors

# Whether there is a monitor, and whether compiled code can call it. Dynamo takes both for
# constants, and compiles again when they change.
_is_on = False
_is_traced = False


def observe(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Reads ``tensor`` as a site of its own, and its gradient when it comes; returns ``tensor``
    itself, so that it may stand within an expression: ``softmax(fastcheck.observe("logits", x))``.

    The record belongs to the module whose forward is running: its path is that of the module and
    ``name``, its role ``output``, that of the gradient ``grad_output``. Outside of all observed
    modules (a part of the loss, a reward) the path is ``name`` alone. A NaN in it is an event, as
    in what a module returns. Of several monitors those read whose module is running in this thread;
    where none is, the one that was installed, or whose model was called, last in it.

    Does nothing where no monitor is installed, in a step that is not observed, or while a monitor
    is paused. Draws no random number and adds no node to autograd's graph. A tensor that has no
    memory of its own (sparse, meta, DTensor) is named in ``summary()`` and not read, nor is the
    gradient of a parameter, which the optimizer's step has read. Inside ``torch.compile`` without a
    graph break (docs/torch-compile.md).

    Args:
        name: printable, without spaces, and with parts divided by single dots: ``"attn.logits"``.
            The same in each call: a monitor reads 4096 different ones at most.
        tensor: of any dtype and device; integers are read too.

    Raises:
        ConfigError: ``name`` is no such name, or ``tensor`` is no tensor.
        OverflowDetected: as a module's hook does.

    Synchronises nothing. One pass over the tensor, also where a module has read it before.
    """
    if (
        not isinstance(name, str)
        or not name.isprintable()
        or " " in name
        or not all(name.split("."))
        or not isinstance(tensor, torch.Tensor)
    ):
        raise _error(name, tensor)
    if not _is_on:
        return tensor
    if is_dynamo_compiling():
        if _is_traced:
            trace_named(name, tensor)
    elif not is_compiling():
        for reader in _reading(name):
            reader.read(name, tensor, None)
    return tensor


def _error(name: object, tensor: object) -> ConfigError:
    if isinstance(tensor, torch.Tensor):
        return ConfigError(
            explain(
                "the name of an observed tensor can't be used",
                expected="printable characters without spaces, parts divided by single dots: "
                '"attn.logits"',
                got=repr(name),
                hint='fastcheck.observe("attn.logits", tensor)',
            )
        )
    return ConfigError(
        explain(
            f"observe({name!r}) was not given a tensor",
            expected="a torch.Tensor",
            got=f"{type(tensor).__name__}: {tensor!r:.80}",
            hint="observe() each tensor of a structure by a name of its own",
        )
    )


def _reading(name: str) -> list[NamedTensors]:
    readers = list(_readers)
    running = [reader for reader in readers if reader.is_running]
    if running or not readers:
        return running
    # In backward a recomputation that calls no module belongs to the reader of the first run.
    repeated = [reader for reader in readers if reader.is_repeated(name)]
    last = last_pass.observer()
    return (
        repeated
        or [reader for reader in readers if reader.observer is last]
        or [max(readers, key=lambda reader: reader.number)]
    )


def _read_in_graph(name: str, tensor: torch.Tensor, traced: Traced) -> list[NamedGradient]:
    found = (reader.read(name, tensor, traced) for reader in _reading(name))
    return [gradient for gradient in found if gradient is not None]


def _begin() -> None:
    global _is_on, _is_traced
    _is_traced = define(_read_in_graph)
    if _is_traced:
        keep_out(observe)
    _is_on = True


def _end() -> None:
    global _is_on
    _is_on = False


_readers: Listeners[NamedTensors] = Listeners(_begin, _end)


def connect(observer: ModuleObserver) -> NamedTensors:
    """From now on observe() reads for this observer too, until ``close()`` or until what is
    returned is freed.
    """
    kind = OpNamedTensors if isinstance(observer, OpModuleObserver) else NamedTensors
    reader = kind(observer)
    _readers.connect(reader)
    last_pass.observer = observer.own_ref
    reader.on_close = _readers.disconnect
    return reader
