"""Megatron Core's GPTModel on the CPU: two ranks of tensor parallelism over gloo against one
process. ``python -m support.programs.megatron_tp`` prints what prove() says as JSON: of the package
as it is, and without the all-reduce in the backward pass of its column-parallel layers.
"""

from __future__ import annotations

import contextlib
import json
import sys
import warnings
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

import fastcheck


class Alone:
    """A process group of one process, where there are no process groups."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


def on_cpu() -> None:
    """Megatron asks for a GPU, and for process groups, where it can do without."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random
    from megatron.core.utils import get_tensor_model_parallel_group_if_none as found

    torch.cuda.current_device = lambda: "cpu"
    random.CudaRNGStatesTracker.fork = lambda self, *name: contextlib.nullcontext()
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron") and hasattr(module, found.__name__):
            setattr(module, found.__name__, lambda *args, **kw: found(*args, **kw) or Alone())
    set_groups(Alone())
    parallel_state._set_global_memory_buffer()


def set_groups(group: Any) -> None:
    from megatron.core import parallel_state

    for name in vars(parallel_state):
        if name.startswith("_") and name.endswith(("_GROUP", "_GROUP_WITH_CP")):
            setattr(parallel_state, name, group)


def gpt(ranks: int) -> torch.nn.Module:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=ranks,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
    )
    spec = get_gpt_layer_local_spec()
    model: torch.nn.Module = GPTModel(config, spec, 64, 16, parallel_output=False)
    return model


def tensor_parallel(model: torch.nn.Module) -> torch.nn.Module:
    """``model`` becomes its share of two ranks."""
    from megatron.core import parallel_state

    set_groups(None)
    parallel_state._GLOBAL_MEMORY_BUFFER = None
    parallel_state.initialize_model_parallel(2)
    share, whole = gpt(2), dict(model.named_parameters())
    for name, parameter in share.named_parameters():
        part = whole[name].detach()
        for dim, size in enumerate(parameter.shape):
            if part.shape[dim] != size:
                part = part.chunk(2, dim)[dist.get_rank()]
        parameter.data.copy_(part)
    vars(model).clear()
    vars(model).update(vars(share))
    return model


def without_backward_all_reduce(model: torch.nn.Module) -> torch.nn.Module:
    from megatron.core.tensor_parallel import layers

    model = tensor_parallel(model)
    layers.copy_to_tensor_model_parallel_region = lambda x, group=None: x
    for module in model.modules():
        if isinstance(module, layers.ColumnParallelLinear):
            module.allreduce_dgrad = False
    return model


def step(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    rows, tokens = batch["ids"].shape
    hidden = ~torch.ones(1, 1, tokens, tokens).tril().bool()
    logits = model(batch["ids"], torch.arange(tokens).expand(rows, tokens), hidden)
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def main() -> None:
    warnings.simplefilter("ignore")
    on_cpu()
    torch.manual_seed(0)
    model, ids = gpt(1), torch.randint(0, 64, (4, 8))
    proof = fastcheck.prove(
        step,
        {"ids": ids, "labels": ids.roll(-1, 1)},
        model=model,
        relations=[
            fastcheck.Ranks(wrap, shares_rows=False)
            for wrap in (tensor_parallel, without_backward_all_reduce)
        ],
    )
    versions = {name: version(name) for name in ("megatron-core", "torch")}
    print(json.dumps({**versions, **proof.to_dict()}))


if __name__ == "__main__":
    main()
