"""Puts faults into models of public libraries: the stop has to name the place, the cause and what
to try.

    make accuracy SUITE="library_faults [--level LEVEL] [--only TEXT]"

Writes bench/results/library_faults.json. A model whose library isn't installed is left out, and
said to be. The exit status is 1 if a text isn't as expected.
"""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from typing import Any, Callable, NamedTuple

import torch
from torch import nn

import fastcheck
import harness
from accuracy.library_models import MODELS

_STEPS = 4


class Fault(NamedTuple):
    """``expected``: a regular expression of the text of the stop, on one line."""

    model: str
    name: str
    put: Callable[[nn.Module], Any]
    expected: str


def _set(path: str, value: float, *at: int) -> Callable[[nn.Module], Any]:
    """Sets the elements of a parameter or buffer, all of them without ``at``."""

    def put(model: nn.Module) -> None:
        held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        held[path].data[at if at else ...] = value

    return put


def _multiplied(path: str, factor: float) -> Callable[[nn.Module], Any]:
    return lambda model: model.get_parameter(path).data.mul_(factor)


def _without_eps(model: nn.Module) -> None:
    for module in model.modules():
        for name in ("eps", "variance_epsilon"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


def _without_eps_or_words(model: nn.Module) -> None:
    _without_eps(model)
    _set("model.embed_tokens.weight", 0.0)(model)


def _constant(model: nn.Module) -> None:
    _without_eps(model)
    _set("conv_in.weight", 0.0)(model)
    _set("conv_in.bias", 1.0)(model)


def _without_masks(model: Any) -> None:
    model.config.mask_ratio = model.vit.embeddings.config.mask_ratio = 0.0


def _negative_variance(model: nn.Module) -> None:
    _set("decode_head.batch_norm.running_var", -1.0, 3)(model)
    model.eval()


def _grown_scales(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if "res_scale" in name:
            parameter.data.fill_(1e20)


_LARGE = r"made them so large \(weights that grew, or were made or loaded so, or data\)"
_DORA = "base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight"

FAULTS = (
    Fault(
        "transformers: gpt2", "NaN in a checkpoint", _set("transformer.wte.weight", torch.nan, 7),
        "32 NaN in parameter transformer.wte.weight of .* check the checkpoint",
    ),
    Fault(
        "transformers: gpt2", "a branch that explodes",
        _multiplied("transformer.h.0.mlp.c_proj.weight", 1e25),
        r"NaN in output of .*transformer.h.1.ln_1 .* so large .*: a norm squares its input",
    ),
    Fault(
        "transformers: llama", "an infinite frequency",
        _set("model.rotary_emb.inv_freq", torch.inf, 1),
        "buffer model.rotary_emb.inv_freq held NaN or Inf before it was read",
    ),
    Fault(
        "transformers: mixtral", "a router that is not initialised",
        _set("model.layers.1.mlp.gate.weight", 3e38),
        rf"parameter model.layers.1.mlp.gate.weight\) 3.00e\+38, whose product .* {_LARGE}",
    ),
    Fault(
        "transformers: qwen3", "a norm without eps", _without_eps_or_words,
        r"model.layers.0.input_layernorm .* 1/sqrt\(0\) is Inf. Add an eps",
    ),
    Fault(
        "transformers: mamba", "exp in forward that breaks backward alone",
        _set("backbone.layers.1.mixer.A_log", 200.0, 3, 2),
        r"parameter backbone.layers.1.mixer.A_log\) reaches 200: exp of more than 88.7",
    ),
    Fault(
        "transformers: rwkv", "exp that breaks one gradient alone",
        _set("rwkv.blocks.1.attention.time_decay", 200.0, 3),
        r"parameter rwkv.blocks.1.attention.time_decay\) reaches 200: exp of more than 88.7",
    ),
    Fault(
        "transformers: clip", "a temperature", _set("logit_scale", 100.0),
        r"self \(parameter logit_scale\) reaches 100: exp of more than 88.7",
    ),
    Fault(
        "transformers: clip", "a projection of zeros", _set("text_projection.weight", 0.0),
        "The divisor other .* is 0 throughout: 0/0 is NaN",
    ),
    Fault(
        "transformers: vit_mae", "a mean over no patches", _without_masks,
        r"The divisor other \(aten.sum\) is 0: 0/0 is NaN. It is a sum: nothing was counted",
    ),
    Fault(
        "transformers: segformer", "a variance below 0", _negative_variance,
        r"NaN in output of .*decode_head.batch_norm .* running_var holds 1 negative number",
    ),
    Fault(
        "peft: dora", "a row of zeros", _set(_DORA, 0.0, 3),
        r"The divisor other \(aten.linalg_vector_norm\) is 0 in 1 of 32 elements: x/0 is Inf. It "
        "is a norm",
    ),
    Fault(
        "diffusers: UNet2DModel", "a constant image", _constant,
        r"NaN in output of .*\(GroupNorm\) .* variance of numbers that are all equal is 0",
    ),
    Fault(
        "timm: poolformerv2_s12", "scales of branches", _grown_scales,
        rf"res_scale2.scale\) 1.00e\+20, whose product .* {_LARGE}",
    ),
    Fault(
        "torch_geometric: ChebConv", "NaN in a weight", _set("first.lins.1.weight", torch.nan, 0),
        "NaN in parameter first.lins.1.weight of .* check the checkpoint",
    ),
)  # fmt: skip


def text_of(fault: Fault, level: str) -> str:
    """The text of the stop, on one line; empty if there is none."""
    torch.manual_seed(0)
    trained = MODELS[fault.model]()
    fault.put(trained.model)
    with fastcheck.install(trained.model, level=level, overflow_nums=1):
        try:
            for i in range(_STEPS):
                trained.step(i)
        except fastcheck.OverflowDetected as stop:
            return " ".join(str(stop).split())
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=" ".join(__doc__.split(":")[0].split()))
    parser.add_argument("--level", choices=("module", "op"), default="module")
    parser.add_argument("--only", default="", help="those whose model has this text")
    options = parser.parse_args()
    rows, wrong, missing = [], [], []
    for fault in FAULTS:
        if options.only not in fault.model:
            continue
        try:
            text = text_of(fault, options.level)
        except ImportError as error:
            missing.append(f"{fault.model}: {error}")
            continue
        is_told = re.search(fault.expected, text) is not None
        if not is_told:
            wrong.append(f"{fault.model}, {fault.name}: {text or 'no stop'}")
        rows.append({"model": fault.model, "fault": fault.name, "is_told": is_told})
        print(f"{fault.model:32} {fault.name:42} {'as expected' if is_told else 'wrong'}")
    for line in (*missing, *wrong):
        print(line)
    print(f"{len(rows)} faults, {len(missing)} left out: {len(wrong)} texts are wrong")
    libraries = {row["model"].partition(":")[0] for row in rows}
    versions = {name: importlib.import_module(name).__version__ for name in sorted(libraries)}
    harness.write_results("library_faults", rows, level=options.level, versions=versions)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
