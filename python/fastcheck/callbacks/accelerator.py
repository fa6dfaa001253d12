"""The adapter for Accelerate: it uses the given Accelerator and does not import accelerate."""

from __future__ import annotations

from typing import Any, Union

import torch

from fastcheck.errors import ConfigError, warn
from fastcheck.monitor.install import install
from fastcheck.monitor.monitor import Monitor
from fastcheck.monitor.session.options import Training
from fastcheck.monitor.sinks.sink import open_sinks

from .seals import CheckpointSeals

__all__ = ["accelerate"]


def accelerate(
    accelerator: Any, model: torch.nn.Module, *, seal: Union[str, bool] = "mark", **options: Any
) -> Monitor:
    """Observes a model that ``accelerator.prepare()`` returned.

        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        monitor = fastcheck.callbacks.accelerate(accelerator, model)

    A step ends when the optimizer steps, so several micro-batches of ``accelerator.accumulate()``
    are one step, and a step that the GradScaler skips counts too. ``optimizer.step()``, or the call
    that finds the fault, raises OverflowDetected.

    Args:
        accelerator: the Accelerator.
        model: what prepare() returned.
        seal: what happens in ``accelerator.save_state()``. ``"mark"``: the directory gets a
            ``fastcheck.json`` (see :func:`fastcheck.seal`). ``"refuse"``: that, and with weights
            that are not finite it raises NonFiniteWeightsError before anything is written. False:
            nothing.
        options: those of :func:`fastcheck.install`. Without ``sinks=`` the scalars of each step go
            to those of ``accelerator.trackers`` that fastcheck has a sink for.

    Returns:
        The Monitor, as of install().

    Raises:
        ConfigError: no Accelerator, a model that was not prepared, or an option can't be used.
    """
    seals = CheckpointSeals(seal)
    if not callable(getattr(accelerator, "register_save_state_pre_hook", None)):
        given = type(accelerator).__name__
        raise ConfigError(f"accelerate() was not given an Accelerator, but a {given}")
    inner = accelerator.unwrap_model(model)
    options.setdefault("sinks", _sinks(accelerator))
    if isinstance(accelerator.scaler, torch.amp.GradScaler):
        options.setdefault("training", Training(scaler=accelerator.scaler))
    monitor = install(inner, **options)
    if seals:

        def before_saving(models: list[Any], weights: list[Any], folder: str) -> None:
            seals.check(inner, folder, "load the checkpoint before it")
            if accelerator.is_main_process:
                # FSDP and DeepSpeed give no weights; their files are written already.
                seals.write(folder, weights[0] if weights else inner, monitor.step_index)

        handle = accelerator.register_save_state_pre_hook(before_saving)
        monitor.at_end.callback(handle.remove)
    return monitor


def _sinks(accelerator: Any) -> list[Any]:
    sinks: list[Any] = []
    for tracker in accelerator.trackers if accelerator.is_main_process else ():
        try:
            if tracker.name in ("tensorboard", "wandb", "aim"):
                sinks.append(tracker.tracker)
            elif tracker.name in ("mlflow", "trackio"):
                sinks += open_sinks(tracker.name)
        except ConfigError as error:
            warn(f"no scalars are written to {tracker.name}: {error}")
    return sinks
