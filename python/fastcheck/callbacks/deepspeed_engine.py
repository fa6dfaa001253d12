"""The adapter for DeepSpeed's engine: it does not import deepspeed."""

from __future__ import annotations

import functools
from typing import Any

import torch

from fastcheck.errors import ConfigError, explain, warn
from fastcheck.monitor.hooks.flat_optimizers import GradientParts
from fastcheck.monitor.install import install
from fastcheck.monitor.monitor import Monitor
from fastcheck.monitor.session.options import Training

from .rows import WaitingRows
from .wrapping import wrap_step

__all__ = ["deepspeed"]


def deepspeed(engine: Any, **options: Any) -> Monitor:
    """Observes the model of an engine that ``deepspeed.initialize()`` returned.

        engine, _, loader, _ = deepspeed.initialize(model=model, config=config)
        monitor = fastcheck.callbacks.deepspeed(engine)

    Under ZeRO 1 and 2 ``parameter.grad`` is None at the update: what is read are the averaged
    gradients that the optimizer keeps, of each rank its partition, under the parameters' names. A
    step that the loss scaler skips is one under loss scaling, as with a GradScaler. Steps have the
    numbers of ``engine.global_steps``, after load_checkpoint() too if that comes first.
    ``engine.step()`` raises OverflowDetected.

    Args:
        engine: the engine.
        options: those of :func:`fastcheck.install`. Without ``sinks=`` the scalars of each step go
            to ``engine.monitor``, if that is enabled.

    Returns:
        The Monitor, as of install().

    Raises:
        ConfigError: this is no engine, or an option can't be used.

    Synchronises nothing. Under ZeRO 3 and with offloading the gradients of parameters are not read,
    with a warning.
    """
    outer = getattr(engine, "optimizer", None)
    if outer is None or not isinstance(getattr(engine, "module", None), torch.nn.Module):
        raise ConfigError(
            explain(
                "this is not a DeepSpeed engine with an optimizer",
                expected="what deepspeed.initialize() returns first",
                got=f"{type(engine).__name__}",
            )
        )
    rows = WaitingRows((functools.partial(_write, engine.monitor),))
    if engine.monitor.enabled and engine.global_rank == 0:
        options.setdefault("sinks", rows)
    if engine.fp16_enabled():
        options.setdefault("training", Training(scaler=lambda: float(outer.loss_scale)))
    monitor = install(engine.module, **options)
    rows.end_with(monitor)
    monitor.begin_at(engine.global_steps)
    if isinstance(outer, torch.optim.Optimizer):  # ZeRO 0 in float32: torch's hooks see all
        return monitor
    if engine.zero_optimization_stage() == 3 or getattr(outer, "cpu_offload", False):
        warn("DeepSpeed keeps the gradients of parameters where they are not read: ZeRO 3, offload")
    wrap_step(
        monitor,
        outer,
        lambda: _gradients(engine),
        getattr(outer, "optimizer", None),
        lambda _: bool(outer.overflow),
        rows.write,
    )
    return monitor


def _gradients(engine: Any) -> GradientParts:
    """The gradients that the optimizer is about to use."""
    kept = getattr(engine.optimizer, "averaged_gradients", None)
    if kept is None:  # ZeRO 0
        for parameter in engine.module.parameters():
            if parameter.grad is not None:
                yield parameter, parameter.grad, False
        return
    for group, parameters in enumerate(getattr(engine.optimizer, "params_in_partition", ())):
        gradients = [g for g in kept.get(group) or () if not getattr(g, "_zero_padding", False)]
        for parameter, gradient in zip(parameters, gradients):
            yield parameter, gradient, engine.dp_world_size > 1


def _write(target: Any, scalars: dict[str, float], step: int) -> None:
    target.write_events([(name, value, step) for name, value in scalars.items()])
