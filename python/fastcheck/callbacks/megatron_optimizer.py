"""The adapter for Megatron Core's optimizers: it does not import megatron."""

from __future__ import annotations

import functools
import math
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Callable, Union

import torch

from fastcheck.errors import ConfigError
from fastcheck.monitor.hooks.flat_optimizer import FlatOptimizer, GradientParts
from fastcheck.monitor.install import install
from fastcheck.monitor.monitor import Monitor
from fastcheck.monitor.session.options import Training
from fastcheck.utils.torch.rank import group_size
from fastcheck.utils.torch.sharding import LocalShard

from .seals import CheckpointSeals
from .wrapping import replace, wrap_step

__all__ = ["megatron"]


def megatron(
    model: Union[torch.nn.Module, Sequence[torch.nn.Module]],
    optimizer: Any,
    *,
    seal: Union[str, bool] = "mark",
    **options: Any,
) -> Monitor:
    """Observes a model that an optimizer of Megatron Core trains, the distributed optimizer among
    them.

        monitor = fastcheck.callbacks.megatron(model, optimizer)

    These optimizers update copies of the parameters and read gradients from ``main_grad``. A step
    ends when ``optimizer.step()`` has returned; a step that the gradient scaler skips, for which it
    returns False, is one under loss scaling. ``optimizer.step()`` raises OverflowDetected.

    Args:
        model: the model, or the list of its chunks, as Megatron's training loop holds it.
        optimizer: what ``get_megatron_optimizer()`` returns.
        seal: what happens in ``megatron.core.dist_checkpointing.save()``, by which Megatron-LM
            saves its distributed checkpoints. ``"mark"``: the directory gets a ``fastcheck.json``
            (see :func:`fastcheck.seal`) with the parts of all ranks. ``"refuse"``: that, and if a
            rank has weights that are not finite every rank raises NonFiniteWeightsError before
            anything is written. False: nothing.
        options: those of :func:`fastcheck.install`.

    Returns:
        The Monitor, as of install().

    Raises:
        ConfigError: this is no such optimizer, or an option can't be used.

    Synchronises nothing, but for the reading of the weights when a checkpoint is saved. With the
    distributed optimizer ``main_grad`` holds reduced gradients in this rank's part alone, and this
    rank's own in the rest.
    """
    seals = CheckpointSeals(seal)
    chunks = [model] if isinstance(model, torch.nn.Module) else list(model)
    if isinstance(optimizer, torch.optim.Optimizer) or not callable(
        getattr(optimizer, "get_loss_scale", None)
    ):
        raise ConfigError(
            "megatron() takes an optimizer of Megatron Core, from get_megatron_optimizer(), not a "
            f"{type(optimizer).__name__}; install(model) finds optimizers of torch.optim by itself"
        )
    if getattr(optimizer.config, "fp16", False):
        options.setdefault("training", Training(scaler=optimizer.get_loss_scale))
    monitor = install(*chunks, **options)
    steps = wrap_step(monitor, optimizer, lambda: _main_gradients(chunks), optimizer, _was_skipped)
    module = sys.modules.get("megatron.core.dist_checkpointing")
    if seals and module is not None:
        references = [weakref.ref(chunk) for chunk in chunks]
        make = functools.partial(_sealing, weakref.ref(steps), references, seals)
        monitor.at_end.callback(replace(module, "save", make))
    return monitor


def _sealing(
    steps: weakref.ref[FlatOptimizer],
    model: Sequence[weakref.ref[torch.nn.Module]],
    seals: CheckpointSeals,
    original: Callable[..., Any],
) -> Callable[..., Any]:
    """``original`` is a function of a module: it must not keep the model alive."""

    def save(sharded_state_dict: Any, checkpoint_dir: Any, *args: Any, **kwargs: Any) -> Any:
        chunks = [chunk for chunk in (reference() for reference in model) if chunk is not None]
        weights = dict(_named_weights(chunks))
        held = set(map(_place, weights.values()))
        shards = [shard for shard in _shards(sharded_state_dict) if _place(shard.data) in held]
        if shards:  # else the weights of another model
            seals.check(weights, checkpoint_dir, "load the checkpoint before it", together=True)
        result = original(sharded_state_dict, checkpoint_dir, *args, **kwargs)
        own = steps()
        if shards and own is not None:
            parts = {shard.key: _part(shard) for shard in shards}
            seals.write_together(checkpoint_dir, parts, own.step_index)
        return result

    return save


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.device, tensor.data_ptr(), tensor.numel()


def _named_weights(chunks: Sequence[torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    for number, chunk in enumerate(chunks):
        prefix = f"{number}." if len(chunks) > 1 else ""
        for name, tensor in (*chunk.named_parameters(), *chunk.named_buffers()):
            if tensor.numel():
                yield prefix + name, tensor


def _shards(state: Any) -> Iterator[Any]:
    """The descriptions of tensors (ShardedTensor) anywhere in a sharded state dict."""
    if isinstance(state, Mapping):
        for value in state.values():
            yield from _shards(value)
    elif isinstance(state, (list, tuple)):
        for value in state:
            yield from _shards(value)
    elif hasattr(state, "global_shape") and isinstance(getattr(state, "data", None), torch.Tensor):
        yield state


def _part(shard: Any) -> Union[torch.Tensor, LocalShard]:
    """``shard.data``, or where it lies in the whole tensor, which the ranks hold together."""
    shape = tuple(shard.global_shape)
    if shape == tuple(shard.local_shape):
        return shard.data
    sizes = (1,) * shard.prepend_axis_num + tuple(shard.local_shape)
    return LocalShard(shard.data, tuple(shard.global_offset), sizes, math.prod(shape))


def _main_gradients(chunks: Sequence[torch.nn.Module]) -> GradientParts:
    is_part = group_size() > 1  # of a tensor, or of the sum over the ranks
    for chunk in chunks:
        for parameter in chunk.parameters():
            main = getattr(parameter, "main_grad", None)
            gradient = parameter.grad if main is None else main
            if isinstance(gradient, torch.Tensor):
                yield parameter, gradient, is_part


def _was_skipped(result: Any) -> bool:
    """``result``: success, gradient norm, number of zeros."""
    return isinstance(result, tuple) and result[0] is False
