"""Tensors and modules that are one, or are two: weights that are loaded into themselves, embeddings
that should be tied, layers that are one layer several times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from fastcheck.utils.torch.memory_ref import memory_ref
from fastcheck.utils.torch.readable import has_memory


def is_itself(module: torch.nn.Module, weights: Any) -> bool:
    """True if ``weights``, a state dictionary, holds all parameters of the module themselves."""
    own = dict(module.named_parameters())
    if not own or not isinstance(weights, Mapping):
        return False
    return all(_is_one(parameter, weights.get(name)) for name, parameter in own.items())


def is_untied(module: Any) -> bool:
    """True for a model of transformers whose embeddings should be one parameter, and are two."""
    config = getattr(module, "config", None)
    if not getattr(config, "tie_word_embeddings", False):
        return False
    if not getattr(module, "_tied_weights_keys", None):
        return False
    ends = (module.get_input_embeddings(), module.get_output_embeddings())
    given, made = (getattr(end, "weight", None) for end in ends)
    if given is None or made is None or given is made:
        return False
    return given.shape == made.shape and not _is_one(given, made)


def repeated(module: Any) -> str:
    """Names the layer that a list of modules holds several times; empty: it holds none so."""
    for name, held in module.named_modules() if module is not None else ():
        if isinstance(held, (torch.nn.ModuleList, torch.nn.Sequential)):
            for layer, count in Counter(held._modules.values()).items():
                if count > 1 and layer is not None and any(True for _ in layer.parameters()):
                    where = f"{name} ({type(held).__name__})" if name else type(held).__name__
                    return f"{where} holds one {type(layer).__name__} {count} times"
    return ""


def _is_one(tensor: torch.Tensor, other: Any) -> bool:
    are_there = isinstance(other, torch.Tensor) and has_memory(tensor) and has_memory(other)
    return are_there and memory_ref(tensor).is_of(other)
