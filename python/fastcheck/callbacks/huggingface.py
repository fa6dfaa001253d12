"""The callback for Hugging Face's ``Trainer``, and for the trainers that derive from it (TRL)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Optional, Union

from fastcheck.errors import ConfigError, warn
from fastcheck.monitor.install import install
from fastcheck.monitor.monitor import Monitor
from fastcheck.monitor.sinks.libraries import TensorBoard
from fastcheck.monitor.sinks.sink import ScalarSink, open_sinks

from .seals import CheckpointSeals

try:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError as error:
    raise ImportError(
        "fastcheck.callbacks.HuggingFace needs transformers: pip install transformers"
    ) from error

__all__ = ["HuggingFace"]


class HuggingFace(TrainerCallback):  # type: ignore[misc]  # its base is Any where transformers is missing
    """Observes the model of a ``transformers.Trainer`` while it trains.

        Trainer(model, args, ..., callbacks=[fastcheck.callbacks.HuggingFace()])

    Steps have the numbers of ``state.global_step``, after a resume too: the step that is number 7
    in a stop report has ``global_step == 7`` while it runs. A step of several micro-batches is one
    step; its batches are named "4 to 7 of epoch 0" where the length of an epoch is known.
    ``Trainer.train()`` raises OverflowDetected, before the optimizer applies the step's
    gradients where install() does that (``sync=``), so that no checkpoint follows.

    A training that ends by an exception leaves the model observed, until the next ``train()`` or
    ``callback.monitor.remove()``.

    Args:
        seal: what happens when the trainer saves a checkpoint. ``"mark"``: the checkpoint's
            directory gets a ``fastcheck.json`` (see :func:`fastcheck.seal`), which marks weights
            that are not finite. ``"refuse"``: that, and with weights that are not finite
            ``train()`` raises NonFiniteWeightsError before the checkpoint is written. False:
            nothing.
        options: those of :func:`fastcheck.install`. Without ``sinks=`` the scalars of each step go
            to those trackers of ``TrainingArguments(report_to=)`` that fastcheck has a sink for.

    Synchronises nothing, but for the reading of the weights when a checkpoint is saved.
    """

    def __init__(self, *, seal: Union[str, bool] = "mark", **options: Any) -> None:
        self._seals = CheckpointSeals(seal)
        self._options = options
        #: The Monitor of the training that runs or ran last; None before the first training.
        self.monitor: Optional[Monitor] = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.monitor is not None:  # a training that ended by an exception
            self.monitor.remove()
        self.monitor = install(kwargs["model"], **{"sinks": _sinks(args), **self._options})
        self.monitor.begin_at(state.global_step)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        name = None if args.ignore_data_skip else _batch_name(args, state, kwargs)
        if self.monitor is not None and name is not None:
            self.monitor.batch(name)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if control.should_save:
            self._seals.check(
                kwargs["model"],
                f"the checkpoint of step {state.global_step:,}",
                "resume from the checkpoint before; fastcheck verify tells which are finite",
            )

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.is_world_process_zero:
            folder = os.path.join(args.output_dir, f"checkpoint-{state.global_step}")
            if os.path.isdir(folder):
                self._seals.write(folder, kwargs["model"], state.global_step)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.monitor is not None:
            self.monitor.remove()


def _batch_name(
    args: TrainingArguments, state: TrainerState, given: Mapping[str, Any]
) -> Optional[str]:
    """The places in the epoch of the step's micro-batches; None where its length is not known."""
    try:
        length = len(given["train_dataloader"])
    except (KeyError, TypeError):  # of an IterableDataset
        return None
    epoch = int(state.epoch or 0)
    first = round(((state.epoch or 0) - epoch) * length)
    if first == length:
        epoch, first = epoch + 1, 0
    last = min(first + args.gradient_accumulation_steps, length) - 1
    return f"{first} of epoch {epoch}" if last <= first else f"{first} to {last} of epoch {epoch}"


def _sinks(args: TrainingArguments) -> list[ScalarSink]:
    """The trackers that the trainer writes to. Its own callbacks, which come first, have begun
    their runs.
    """
    sinks: list[ScalarSink] = []
    for name in args.report_to:
        if name in ("wandb", "mlflow", "trackio"):
            try:
                sinks += open_sinks(name)
            except ConfigError as error:
                warn(f"no scalars are written: {error}")
        elif name == "tensorboard" and args.process_index == 0:
            # Beside the folder that the trainer's callback makes, which no other callback sees.
            runs = os.environ.get("TENSORBOARD_LOGGING_DIR") or os.path.join(
                args.output_dir, "runs"
            )
            sinks.append(TensorBoard(directory=os.path.join(runs, "fastcheck")))
    return sinks
