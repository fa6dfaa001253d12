"""The callback for Composer's ``Trainer``."""

from __future__ import annotations

import functools
import weakref
from typing import Any, Callable, Optional, Union

from fastcheck.monitor.install import install
from fastcheck.monitor.monitor import Monitor

from .seals import CheckpointSeals
from .wrapping import WaitingRows, replace

try:
    from composer import Callback, Logger, State
    from composer.utils import checkpoint
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
        seal: what happens when the trainer saves a checkpoint, by its ``save_interval`` or by
            ``save_checkpoint()``. ``"mark"``: it gets a ``<file>.fastcheck.json`` beside it (see
            :func:`fastcheck.seal`), but not a sharded checkpoint. ``"refuse"``: that, and with
            weights that are not finite it raises NonFiniteWeightsError before the file is written.
            False: nothing.
        options: those of :func:`fastcheck.install`. Without ``sinks=`` the scalars of the youngest
            step go to the trainer's loggers at the end of each batch.

    Synchronises nothing, but for the reading of the weights when a checkpoint is saved.
    """

    def __init__(self, *, seal: Union[str, bool] = "mark", **options: Any) -> None:
        self._seals = CheckpointSeals(seal)
        self._restore: Callable[[], None] = lambda: None
        self._options = options
        self._rows = WaitingRows(())
        #: The Monitor of the fit that runs or ran last; None before the first fit.
        self.monitor: Optional[Monitor] = None

    def init(self, state: State, logger: Logger) -> None:
        if self._seals:
            self._restore()
            make = functools.partial(_sealing, weakref.ref(state), self._seals)
            # Replaced in the module, where the trainer and its CheckpointSaver look it up.
            self._restore = replace(checkpoint, "save_checkpoint", make)

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
        self._restore()
        self._leave()

    def _leave(self) -> None:
        """The exception that has ended the fit, if any, is the exception to be seen."""
        if self.monitor is not None:
            self.monitor.__exit__(RuntimeError, RuntimeError(), None)


def _sealing(
    own: Callable[[], Any], seals: CheckpointSeals, original: Callable[..., Any]
) -> Callable[..., Any]:
    def save_checkpoint(
        state: Any, filename: str = "ep{epoch}-ba{batch}-rank{rank}", **kwargs: Any
    ) -> Any:
        if state is not own():
            return original(state, filename, **kwargs)
        path = checkpoint.get_save_filename(state, filename)
        seals.check(state.model, path, "load the checkpoint before it")
        written = original(state, filename, **kwargs)
        if written and state.fsdp_sharded_state_dict_enabled:
            seals.leave_out(written, "it is a shard; verify() reads whole weights")
        elif written:
            seals.write(written, state.get_model_state_dict(), int(state.timestamp.batch))
        return written

    return save_checkpoint
