"""The adapter for Megatron Core's optimizers: it does not import megatron."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Union

import torch

from fastcheck.errors import ConfigError, explain
from fastcheck.monitor.hooks.flat_optimizers import GradientParts
from fastcheck.monitor.install import install
from fastcheck.monitor.monitor import Monitor
from fastcheck.monitor.session.options import Training
from fastcheck.utils.torch.rank import group_size

from .wrapping import wrap_step

__all__ = ["megatron"]


def megatron(
    model: Union[torch.nn.Module, Sequence[torch.nn.Module]], optimizer: Any, **options: Any
) -> Monitor:
    """Observes a model that an optimizer of Megatron Core trains, the distributed one among them.

        monitor = fastcheck.callbacks.megatron(model, optimizer)

    These optimizers update copies of the parameters and read gradients from ``main_grad``. A step
    ends when ``optimizer.step()`` has returned; one that the gradient scaler skips, for which it
    returns False, is one under loss scaling. ``optimizer.step()`` raises OverflowDetected.

    Args:
        model: the model, or the list of its chunks, as Megatron's training loop holds it.
        optimizer: what ``get_megatron_optimizer()`` returns.
        options: those of :func:`fastcheck.install`.

    Returns:
        The Monitor, as of install().

    Raises:
        ConfigError: this is no such optimizer, or an option can't be used.

    Synchronises nothing. With the distributed optimizer ``main_grad`` holds reduced gradients in
    this rank's part alone, and this rank's own in the rest.
    """
    chunks = [model] if isinstance(model, torch.nn.Module) else list(model)
    if isinstance(optimizer, torch.optim.Optimizer) or not callable(
        getattr(optimizer, "get_loss_scale", None)
    ):
        raise ConfigError(
            explain(
                "this is not an optimizer of Megatron Core",
                expected="what get_megatron_optimizer() returns",
                got=type(optimizer).__name__,
                hint="fastcheck.install(model) finds optimizers of torch.optim by itself",
            )
        )
    if getattr(optimizer.config, "fp16", False):
        options.setdefault("training", Training(scaler=optimizer.get_loss_scale))
    monitor = install(*chunks, **options)
    wrap_step(monitor, optimizer, lambda: _main_gradients(chunks), optimizer, _was_skipped)
    return monitor


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
