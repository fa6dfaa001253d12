"""The callback for Lightning's ``Trainer``."""

from __future__ import annotations

import functools
from typing import Any, Optional, Union

from fastcheck.monitor.install import install
from fastcheck.monitor.monitor import Monitor

from .seals import CheckpointSeals
from .wrapping import WaitingRows

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
except ImportError as error:
    raise ImportError(
        "fastcheck.callbacks.Lightning needs lightning: pip install lightning"
    ) from error

__all__ = ["Lightning"]


class Lightning(Callback):  # type: ignore[misc]  # its base is Any where lightning is missing
    """Observes the LightningModule while ``Trainer.fit()`` runs.

        lightning.Trainer(callbacks=[fastcheck.callbacks.Lightning()])

    Steps have the numbers of ``trainer.global_step``, after a resume too, and their batches the
    names "3 of epoch 0". ``Trainer.fit()`` raises
    OverflowDetected, after the callbacks' ``on_exception``.

    Args:
        seal: what happens when the trainer saves a checkpoint. ``"mark"``: it gets a
            ``<file>.fastcheck.json`` beside it (see :func:`fastcheck.seal`). ``"refuse"``: that,
            and with weights that are not finite ``fit()`` raises NonFiniteWeightsError before the
            file is written. False: nothing.
        is_default: do nothing in a trainer that has another of these callbacks.
        options: those of :func:`fastcheck.install`. Without ``sinks=`` the scalars of each step go
            to the trainer's loggers: by a thread to TensorBoard and W&B, to the others every
            ``log_every_n_steps`` steps as metrics are, those of the youngest step.

    Synchronises nothing, but for the reading of the weights when a checkpoint is saved.
    """

    def __init__(
        self, *, seal: Union[str, bool] = "mark", is_default: bool = False, **options: Any
    ) -> None:
        self._seals = CheckpointSeals(seal)
        self._is_default = is_default
        self._options = options
        #: The Monitor of the fit that runs or ran last; None before the first fit.
        self.monitor: Optional[Monitor] = None
        self._rows = WaitingRows(())

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._gives_way(trainer):
            return
        self.monitor = install(pl_module, **{"sinks": self._sinks(trainer), **self._options})
        self._rows.end_with(self.monitor)
        self.monitor.begin_at(trainer.global_step)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        original = trainer.save_checkpoint
        if not self._seals or stage != "fit" or hasattr(original, "_fastcheck"):
            return
        if self._gives_way(trainer):
            return

        # Lightning does not pass the path to the callbacks' hook for saving.
        @functools.wraps(original)
        def save_checkpoint(filepath: Any, *args: Any, **kwargs: Any) -> Any:
            self._seals.check(pl_module, filepath, "go back to one that is finite")
            result = original(filepath, *args, **kwargs)
            if trainer.is_global_zero:
                self._seals.write(filepath, pl_module, trainer.global_step)
            return result

        save_checkpoint._fastcheck = True  # type: ignore[attr-defined]  # not to be wrapped twice
        trainer.save_checkpoint = save_checkpoint

    def _gives_way(self, trainer: Trainer) -> bool:
        all_of_them = [
            callback for callback in trainer.callbacks if isinstance(callback, Lightning)
        ]
        first = sorted(all_of_them, key=lambda callback: callback._is_default)[:1]
        return self._is_default and self not in first

    def _sinks(self, trainer: Trainer) -> list[Any]:
        if not trainer.is_global_zero or "sinks" in self._options:
            return []
        direct = [
            logger
            for logger in trainer.loggers
            if isinstance(logger, (TensorBoardLogger, WandbLogger))
        ]
        others = [logger.log_metrics for logger in trainer.loggers if logger not in direct]
        self._rows = WaitingRows(others)
        return [logger.experiment for logger in direct] + ([self._rows] if others else [])

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self.monitor is not None:
            self.monitor.batch(f"{batch_idx} of epoch {trainer.current_epoch}")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        if trainer.global_step % trainer.log_every_n_steps == 0:
            self._rows.write()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.monitor is not None:
            self.monitor.remove()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        if self.monitor is not None:
            # The exception that ends the fit is shown, and no other.
            self.monitor.__exit__(type(exception), exception, exception.__traceback__)
