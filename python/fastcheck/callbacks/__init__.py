"""Adapters for trainers: one file for each framework, which is imported when its adapter is used.

    transformers.Trainer(..., callbacks=[fastcheck.callbacks.HuggingFace()])
    lightning.Trainer(callbacks=[fastcheck.callbacks.Lightning()])
    composer.Trainer(..., callbacks=[fastcheck.callbacks.Composer()])
    ray.train.RunConfig(callbacks=[fastcheck.callbacks.Ray()])
    monitor = fastcheck.callbacks.accelerate(accelerator, model)
    monitor = fastcheck.callbacks.deepspeed(engine)
    monitor = fastcheck.callbacks.megatron(model, optimizer)
    proof = fastcheck.callbacks.prove_trainer(trainer)

Imports ``monitor``, ``proving``, ``report``, ``sealing`` and ``utils``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fastcheck.errors import no_attribute

if TYPE_CHECKING:
    from .accelerator import accelerate
    from .composer import Composer
    from .deepspeed_engine import deepspeed
    from .huggingface import HuggingFace
    from .lightning import Lightning
    from .megatron_optimizer import megatron
    from .proof import prove_trainer
    from .ray_train import Ray

__all__ = [
    "Composer",
    "HuggingFace",
    "Lightning",
    "Ray",
    "accelerate",
    "deepspeed",
    "megatron",
    "prove_trainer",
]

# Not the functions' own names: a submodule would take their place in the package.
_MODULES = {
    "Composer": "composer",
    "HuggingFace": "huggingface",
    "Lightning": "lightning",
    "accelerate": "accelerator",
    "Ray": "ray_train",
    "deepspeed": "deepspeed_engine",
    "megatron": "megatron_optimizer",
    "prove_trainer": "proof",
}


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise no_attribute(__name__, name, __all__)
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
