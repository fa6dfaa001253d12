"""The callback for Lightning's ``Trainer``."""

from __future__ import annotations

from typing import Any, Optional

from fastcheck.monitor.install import install
from fastcheck.monitor.monitor import Monitor

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError as error:
    raise ImportError(
        "fastcheck.callbacks.Lightning needs lightning: pip install lightning"
    ) from error

__all__ = ["Lightning"]


class Lightning(Callback):  # type: ignore[misc]  # lightning may be untyped
    """Observes the LightningModule while ``Trainer.fit()`` runs.

        lightning.Trainer(callbacks=[fastcheck.callbacks.Lightning()])

    Steps have the numbers of ``trainer.global_step``, after a resume too. ``Trainer.fit()`` raises
    OverflowDetected, after the callbacks' ``on_exception``.

    Args:
        options: those of :func:`fastcheck.install`.

    Synchronises nothing.
    """

    def __init__(self, **options: Any) -> None:
        self._options = options
        #: The Monitor of the fit that runs or ran last; None before the first one.
        self.monitor: Optional[Monitor] = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.monitor = install(pl_module, **self._options)
        self.monitor.begin_at(trainer.global_step)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.monitor is not None:
            self.monitor.remove()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        if self.monitor is not None:
            # The exception that ends the fit is the one to be seen.
            self.monitor.__exit__(type(exception), exception, exception.__traceback__)
