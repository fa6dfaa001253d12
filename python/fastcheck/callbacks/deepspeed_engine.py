"""The adapter for DeepSpeed's engine: it does not import deepspeed."""

from __future__ import annotations

import functools
import os
from typing import Any, Callable, Optional, Union

import torch

from fastcheck.errors import ConfigError, warn
from fastcheck.monitor.hooks.flat_optimizer import GradientParts
from fastcheck.monitor.install import install
from fastcheck.monitor.monitor import Monitor
from fastcheck.monitor.session.options import Training
from fastcheck.utils.torch.sharding import without_padding

from .seals import CheckpointSeals
from .wrapping import WaitingRows, replace, wrap_step

__all__ = ["deepspeed"]


def deepspeed(engine: Any, *, seal: Union[str, bool] = "mark", **options: Any) -> Monitor:
    """Observes the model of an engine that ``deepspeed.initialize()`` returned.

        engine, _, loader, _ = deepspeed.initialize(model=model, config=config)
        monitor = fastcheck.callbacks.deepspeed(engine)

    Under ZeRO 1 and 2 ``parameter.grad`` is None at the update: what is read are the averaged
    gradients that the optimizer keeps, of each rank its partition, under the parameters' names.
    Under ZeRO 3 the parameters too are read as their partitions, where they lie: nothing is
    gathered. A step that the loss scaler skips is one under loss scaling, as with a GradScaler.
    Steps have the numbers of ``engine.global_steps``, after load_checkpoint() too if that comes
    first. ``engine.step()`` raises OverflowDetected.

    Args:
        engine: the engine.
        seal: what happens in ``engine.save_checkpoint()``. ``"mark"``: the folder of the tag gets a
            ``fastcheck.json`` (see :func:`fastcheck.seal`); with weights that are spread over
            several files (ZeRO 3, pipeline, tensor or expert parallel) UnsealedCheckpointWarning is
            given instead, with what can be done. ``"refuse"``: that, and if a
            rank has weights that are not finite every rank raises NonFiniteWeightsError before
            anything is written. False: nothing.
        options: those of :func:`fastcheck.install`. Without ``sinks=`` the scalars of each step go
            to ``engine.monitor``, if that is enabled.

    Returns:
        The Monitor, as of install().

    Raises:
        ConfigError: this is no engine, or an option can't be used.

    Synchronises nothing, but for the reading of the weights when a checkpoint is saved.
    With offloading the gradients of parameters are not read, with a warning.
    """
    seals = CheckpointSeals(seal)
    outer = getattr(engine, "optimizer", None)
    if outer is None or not isinstance(getattr(engine, "module", None), torch.nn.Module):
        raise ConfigError(
            "deepspeed() takes a DeepSpeed engine with an optimizer, which deepspeed.initialize() "
            f"returns, not a {type(engine).__name__}"
        )
    rows = WaitingRows((functools.partial(_write, engine.monitor),))
    if engine.monitor.enabled and engine.global_rank == 0:
        options.setdefault("sinks", rows)
    if engine.fp16_enabled():
        options.setdefault("training", Training(scaler=lambda: float(outer.loss_scale)))
    monitor = install(engine.module, **options)
    rows.end_with(monitor)
    monitor.begin_at(engine.global_steps)
    if seals:
        sealing = replace(engine, "save_checkpoint", functools.partial(_sealing, engine, seals))
        monitor.at_end.callback(sealing)
    if isinstance(outer, torch.optim.Optimizer):  # ZeRO 0 in float32: torch's hooks see all
        return monitor
    if getattr(outer, "cpu_offload", False) or getattr(outer, "offload_optimizer", False):
        warn("DeepSpeed keeps the gradients of parameters where they are not read: offload")
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
    if engine.zero_optimization_stage() == 3:
        for group, parameters in enumerate(getattr(engine.optimizer, "fp16_groups", ())):
            for parameter, gradient in zip(parameters, kept.get(group) or ()):
                own = without_padding(parameter, gradient)
                if own.numel():
                    yield parameter, own, engine.dp_world_size > 1
        return
    for group, parameters in enumerate(getattr(engine.optimizer, "params_in_partition", ())):
        gradients = [g for g in kept.get(group) or () if not getattr(g, "_zero_padding", False)]
        for parameter, gradient in zip(parameters, gradients):
            yield parameter, gradient, engine.dp_world_size > 1


def _sealing(
    engine: Any, seals: CheckpointSeals, original: Callable[..., Any]
) -> Callable[..., Any]:
    def save_checkpoint(save_dir: Any, tag: Optional[Any] = None, *args: Any, **kwargs: Any) -> Any:
        name = f"global_step{engine.global_steps}" if tag is None else str(tag)
        folder = os.path.join(str(save_dir), name)
        seals.check(engine.module, folder, "load the tag before it", together=True)
        result = original(save_dir, tag, *args, **kwargs)
        reason = _why_not_sealed(engine)
        if engine.global_rank == 0 and reason:
            seals.leave_out(folder, reason)
        elif engine.global_rank == 0:
            without = bool(kwargs.get("exclude_frozen_parameters", False))
            weights = engine.module_state_dict(exclude_frozen_parameters=without)
            seals.write(folder, weights, int(engine.global_steps))
        return result

    return save_checkpoint


def _why_not_sealed(engine: Any) -> str:
    """The reason why no file of the checkpoint has the weights as the model names them, and what to
    do.
    """
    if engine.zero_optimization_stage() == 3:
        return (
            "under ZeRO 3 its files hold flat partitions, in which the weights have no names; "
            "convert it (zero_to_fp32.py in its folder) and seal the result with fastcheck.seal(), "
            "or call engine.save_16bit_model(). seal='refuse' checks the weights all the same"
        )
    is_spread = (
        getattr(engine, "mp_world_size", 1) > 1
        or getattr(engine, "has_moe_layers", False)
        or getattr(engine, "pipeline_parallelism", False)
    )
    if not is_spread:
        return ""
    return (
        "with tensor, pipeline or expert parallelism its weights are in one file for each part; "
        "call fastcheck.seal(file, state_dict) for each, with what was saved in it"
    )


def _write(target: Any, scalars: dict[str, float], step: int) -> None:
    target.write_events([(name, value, step) for name, value in scalars.items()])
