"""The callback for Composer's ``Trainer``."""

from __future__ import annotations

from typing import Any, Optional

from fastcheck.monitor.install import install
from fastcheck.monitor.monitor import Monitor

from .rows import WaitingRows

try:
    from composer import Callback, Logger, State
except ImportError as error:
    raise ImportError(
        "fastcheck.callbacks.Composer needs composer: pip install mosaicml"
    ) from error

__all__ = ["Composer"]


class Composer(Callback):  # type: ignore[misc]  # its base is Any where composer is missing
    """Observes the model while ``composer.Trainer.fit()`` runs.

        composer.Trainer(..., callbacks=[fastcheck.callbacks.Composer()])

    Steps have the numbers of ``state.timestamp.batch``, after a resume too. ``fit()`` raises
    OverflowDetected.

    Args:
        options: those of :func:`fastcheck.install`. Without ``sinks=`` the scalars of the youngest
            step go to the trainer's loggers at the end of each batch.

    Synchronises nothing.
    """

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._rows = WaitingRows(())
        #: The Monitor of the fit that runs or ran last; None before the first one.
        self.monitor: Optional[Monitor] = None

    def fit_start(self, state: State, logger: Logger) -> None:
        self._leave()  # a fit that ended by an exception
        self._rows = WaitingRows((logger.log_metrics,))
        self.monitor = install(state.model, **{"sinks": self._rows, **self._options})
        self._rows.end_with(self.monitor)
        self.monitor.begin_at(int(state.timestamp.batch))

    def batch_end(self, state: State, logger: Logger) -> None:
        self._rows.write()

    def fit_end(self, state: State, logger: Logger) -> None:
        if self.monitor is not None:
            self.monitor.remove()

    def close(self, state: State, logger: Logger) -> None:
        self._leave()

    def _leave(self) -> None:
        """The exception that has ended the fit, if any, is the one to be seen."""
        if self.monitor is not None:
            self.monitor.__exit__(RuntimeError, RuntimeError(), None)
