"""``prove()`` of the step of a trainer of transformers or Lightning."""

from __future__ import annotations

from typing import Any

from fastcheck.errors import ConfigError
from fastcheck.proving.prove import prove
from fastcheck.proving.result import Proof
from fastcheck.utils.torch.training_state import Generators


def prove_trainer(trainer: Any, *, model: Any = None, batch: Any = None, **options: Any) -> Proof:
    """fastcheck.prove() of the loss that a trainer computes, and its gradients::

        print(fastcheck.callbacks.prove_trainer(trainer))

    Args:
        trainer: a transformers.Trainer, or a lightning.Trainer.
        model: of a lightning.Trainer that has not begun: the LightningModule.
        batch: None: the first batch of the trainer's training data. The generators are as before.
        options: of prove().

    Raises:
        ConfigError: another kind of trainer, or a trainer without a model or training data.
    """
    kept = Generators()
    try:
        if hasattr(trainer, "compute_loss") and hasattr(trainer, "get_train_dataloader"):
            model = model or trainer.model
            if batch is None:
                batch = next(iter(trainer.get_train_dataloader()))
            batch = trainer._prepare_inputs(batch)
            step = trainer.compute_loss
        else:
            model = model or getattr(trainer, "lightning_module", None)
            if not hasattr(model, "training_step"):
                raise _refused("a transformers.Trainer, or a lightning.Trainer and model=", trainer)
            if batch is None:
                source = getattr(trainer, "train_dataloader", None) or model.train_dataloader()
                batch = next(iter(source))

            def step(model: Any, batch: Any) -> Any:
                return model.training_step(batch, 0)
    finally:
        kept.put_back()
    return prove(lambda model, batch: step(model, batch), batch, model=model, **options)


def _refused(expected: str, got: object) -> ConfigError:
    hint = "fastcheck.callbacks.prove_trainer(trainer)"
    what = "no step of this trainer is known"
    return ConfigError(what, expected=expected, got=repr(got), hint=hint)
