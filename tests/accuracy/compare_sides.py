"""Compares runs whose sides should agree though they are computed in another way, and runs beside
them that only look so.

    make accuracy SUITE="compare_sides [--only WORD]"

Writes bench/results/compare_sides.json. A healthy pair has to be equal, with the option that the
report itself names where the pair needs one; a wrong pair has to be different. The exit status is 1
otherwise.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable

import torch

import fastcheck
import harness
from accuracy.sides_cases import CASES, train_case
from accuracy.sides_fields import train_field
from accuracy.sides_layers import train_layers
from accuracy.sides_layouts import train_layout
from accuracy.sides_programs import train, train_images, train_ranks, train_resumed, train_split
from accuracy.sides_schedules import dump_schedule

Options = dict[str, Any]


@dataclass(frozen=True)
class Pair:
    """``accept``: what the report of the pair has to advise. ``said``: a part of the report.
    ``rename``, ``exact``: as compare() takes them. ``repeat``: the options of a second run of the
    reference.
    """

    name: str
    is_healthy: bool
    actual: Options
    reference: Options = field(default_factory=dict)
    accept: str = ""
    said: str = ""
    run: Callable[..., None] = train
    rename: Any = None
    repeat: Options | None = None
    exact: bool = False


def _healthy(name: str, said: str = "rounding: step", **actual: Any) -> Pair:
    return Pair(name, True, actual, said=said)


def _wrong(name: str, said: str = "", reference: Options | None = None, **actual: Any) -> Pair:
    return Pair(name, False, actual, reference or {}, said=said)


F64, BF16 = {"dtype": torch.float64}, {"dtype": torch.bfloat16}
SMALL = {"rate": 1e-6}

PAIRS = [
    _healthy("the same", said="identical"),
    _healthy("SDPA", attention="sdpa"),
    Pair("SDPA, float64", True, {"attention": "sdpa", **F64}, F64, said="rounding: step"),
    Pair("SDPA, bfloat16", True, {"attention": "sdpa", **BF16}, BF16),
    _healthy("einsum", attention="einsum"),
    Pair(
        "q, k, v in one", True, {"attention": "fused qkv"}, accept="missing", said="rounding: step"
    ),
    _healthy("F.rms_norm", norm="torch"),
    _healthy("a norm multiplied in another order", norm="order"),
    _healthy("a rotation of complex numbers", rope="complex"),
    _healthy("GELU written out", mlp="formula"),
    _healthy("the loss in chunks", said="", loss="chunks"),
    _healthy("log_softmax and nll_loss", said="", loss="log_softmax"),
    _healthy("fused AdamW", said="another kernel of the same update", optimizer="fused"),
    _healthy("AdamW of lists", said="another kernel of the same update", optimizer="foreach"),
    Pair(
        "fused AdamW, small rate",
        True,
        {"optimizer": "fused", **SMALL},
        SMALL,
        said="another kernel of the same update",
    ),
    Pair("SDPA, small rate", True, {"attention": "sdpa", **SMALL}, SMALL, said="rounding: step"),
    _healthy("recomputed", said="identical", recompute=True),
    Pair(
        "channels_last",
        True,
        {"layout": "channels_last"},
        accept="order",
        said="channels_last",
        run=train_images,
    ),
    Pair("rows flipped, labels too", True, {"batch": "rows"}, accept="order", said="rows"),
    Pair(
        "a temperature within the model",
        True,
        {"temperature": "within"},
        {"temperature": "behind"},
        accept="missing",
    ),
    _wrong("eps of the norm", norm="eps"),
    _wrong(
        "a temperature of one side",
        "in actual alone the model returns output[0] as a tensor of its own",
        temperature="within",
    ),
    _wrong(
        "a temperature behind one side",
        "in actual alone Loss reads input[0] as a tensor of its own",
        temperature="behind",
    ),
    _wrong(
        "weights put back",
        "all parameters of actual in step 3 are what they were in step 0, to the bit",
        optimizer="put back",
    ),
    Pair(
        "images, another range",
        False,
        {"fault": "range"},
        said="its statistics are those of reference times 2 minus 1",
        run=train_images,
    ),
    _wrong("another norm", norm="max"),
    _wrong("scale of the attention", attention="scale"),
    _wrong("not causal", attention="not causal"),
    _wrong("one token is not seen", attention="window"),
    _wrong("two heads swapped", attention="heads"),
    _wrong("two tokens swapped", attention="tokens"),
    _wrong("key and value swapped", attention="key and value"),
    _wrong("rotation of neighbours", rope="interleaved"),
    _wrong("positions shifted by one", rope="shift"),
    _wrong("positions in bfloat16", rope="bfloat16 positions"),
    _wrong("base of the rotation", rope="base"),
    _wrong("GELU by tanh", mlp="tanh"),
    _wrong("no bias", mlp="no bias", reference={"mlp": "addmm"}),
    _wrong("mean of means", loss="mean of means"),
    _wrong("label smoothing", loss="smoothing"),
    _wrong("two labels swapped", batch="labels"),
    _wrong("transposed gradient", "gradient of", optimizer="transposed gradient"),
    _wrong("two rows of a gradient swapped", "gradient of", optimizer="rows of the gradient"),
    Pair(
        "SDPA, a frozen weight", False, {"attention": "sdpa", "optimizer": "frozen", **SMALL}, SMALL
    ),
    _wrong(
        "one element of a weight", "more than rounding makes of an update", optimizer="one element"
    ),
    Pair("two heads swapped, bfloat16", False, {"attention": "heads", **BF16}, BF16),
    Pair("two tokens swapped, bfloat16", False, {"attention": "tokens", **BF16}, BF16),
    Pair("two tokens swapped, float64", False, {"attention": "tokens", **F64}, F64),
    Pair("fused AdamW, a frozen weight", False, {"optimizer": "frozen"}, {"optimizer": "fused"}),
    _wrong("F.rms_norm, transposed gradient", norm="torch", optimizer="transposed gradient"),
    _wrong("SDPA, transposed gradient", attention="sdpa", optimizer="transposed gradient"),
    _wrong("SDPA, gradient's rows", attention="sdpa", optimizer="rows of the gradient"),
    *(
        _wrong(f"{fault}, rate {rate}", optimizer=fault, rate=rate, reference={"rate": rate})
        for fault in ("frozen", "wrong way", "twice", "half", "transposed gradient")
        for rate in (1e-3, 1e-5, 1e-6)
    ),
    *(
        Pair(f"images, {fault}", False, {"fault": fault}, run=train_images)
        for fault in ("transposed", "channels", "read as another layout", "rows")
    ),
    Pair(
        "channels_last and images transposed",
        False,
        {"layout": "channels_last", "fault": "transposed"},
        run=train_images,
    ),
]
RESUMED = [
    Pair("resumed", True, {}, {"fault": "whole"}, said="where the weights are", run=train_resumed),
    Pair("resumed, read the other way round", True, {"fault": "whole"}, {}, run=train_resumed),
    Pair(
        "resumed, SGD",
        True,
        {"optimizer": "SGD"},
        {"optimizer": "SGD", "fault": "whole"},
        run=train_resumed,
    ),
    Pair("resumed later", True, {"begin": 5}, {"fault": "whole"}, run=train_resumed),
    Pair("resumed twice", True, {"begin": 5}, {"begin": 3}, run=train_resumed),
    *(
        Pair(
            f"resumed, {fault}",
            False,
            {"fault": fault},
            {"fault": "whole"},
            "",
            said,
            train_resumed,
        )
        for fault, said in {
            "weights": "initial weights NO",
            "one weight": "initial weights NO",
            "two weights swapped": "initial weights NO",
            "bfloat16": "initial weights NO",
            "buffers": "initial weights NO",
            "constant buffer": "initial weights NO",
            "moments of two parameters swapped": "update NO",
            "steps of Adam": "update NO",
            "second moments": "update NO",
            "moments of one parameter": "update NO",
            "moments": "update NO",
            "schedule": "hyper-parameters NO",
            "learning rate": "hyper-parameters NO",
            "weight decay": "hyper-parameters NO",
            "random numbers": "forward NO",
            "batches from the beginning": "batches NO",
            "a batch left out": "batches NO",
            "a batch twice": "batches NO",
        }.items()
    ),
]
ONCE = "the batch is split in another way"
SPLIT = [
    Pair("4 parts", True, {"parts": 4}, said=ONCE, run=train_split),
    Pair("the whole batch against 4 parts", True, {}, {"parts": 4}, said=ONCE, run=train_split),
    Pair("4 parts against 2", True, {"parts": 4}, {"parts": 2}, said=ONCE, run=train_split),
    Pair("2 parts, clipped", True, {"parts": 2, "clip": 0.1}, {"clip": 0.1}, run=train_split),
    Pair(
        "2 parts, SGD",
        True,
        {"parts": 2, "optimizer": "SGD"},
        {"optimizer": "SGD"},
        run=train_split,
    ),
    Pair("2 ranks", True, {"ranks": 2}, said="on 2 ranks in actual", run=train_ranks),
    Pair("2 ranks against 4", True, {"ranks": 2}, {"ranks": 4}, said=ONCE, run=train_ranks),
    *(
        Pair(f"4 parts, {fault}", False, {"parts": 4, "fault": fault}, {}, "", said, train_split)
        for fault, said in {
            "another batch": "batches NO",
            "labels of another part": "batches NO",
            "mean of means": "loss NO",
            "not divided": "loss NO",
            "the last part is lost": "NO",
            "the sum is lost": "loss NO",
        }.items()
    ),
    Pair(
        "4 parts, clipped by part",
        False,
        {"parts": 4, "clip": 0.1, "fault": "clipped by part"},
        {"clip": 0.1},
        run=train_split,
    ),
    *(
        Pair(
            f"4 parts, {fault}",
            False,
            {"parts": 4, "optimizer": fault},
            said="update NO",
            run=train_split,
        )
        for fault in ("frozen", "half", "transposed gradient")
    ),
    Pair(
        "2 ranks, one gradient is not reduced, against 2",
        False,
        {"ranks": 2, "fault": "one gradient is not reduced"},
        {"ranks": 2},
        said="there gradients are not averaged over the ranks",
        run=train_ranks,
    ),
    Pair(
        "2 ranks, the batch of rank 0, against 2",
        False,
        {"ranks": 2, "fault": "the batch of rank 0"},
        {"ranks": 2},
        said="rank 1 of actual reads what rank 0 of reference does, as rank 0 does",
        run=train_ranks,
    ),
    *(
        Pair(f"2 ranks, {fault}", False, {"ranks": 2, "fault": fault}, said=said, run=train_ranks)
        for fault, said in {
            "not averaged": "NO",
            "one gradient is not reduced": "NO",
            "another weight on rank 1": "2 · optimizer · 2.weight on rank 1 of actual is not that",
            "learning rate of rank 1": "optimizers.rank 1[0].groups[0].lr",
            "the batch of rank 0": "batches NO",
        }.items()
    ),
]
AUTOCAST, LONG = {"autocast": True}, {"steps": 30, "rate": 3e-3}


def _layers(is_healthy: bool, actual: Options, *common: Options) -> Pair:
    reference = {key: value for options in common for key, value in options.items()}
    parts = [f"{key} {value}" for key, value in {**reference, **actual}.items()]
    return Pair(", ".join(parts), is_healthy, {**reference, **actual}, reference, run=train_layers)


LAYERS = [
    Pair("embedding one-hot", True, {"embedding": "one-hot"}, accept="missing", run=train_layers),
    *(
        _layers(True, actual, *common)
        for actual, *common in (
            ({"attention": "grouped"}, {}),
            ({"attention": "grouped"}, AUTOCAST),
            ({"attention": "softmax written out"}, {}),
            ({"attention": "softmax written out"}, AUTOCAST),
            ({"norm": "torch"}, {}),
            ({"norm": "torch"}, {"optimizer": "SGD"}),
            ({"norm": "torch"}, F64),
            ({"norm": "torch"}, BF16),
            ({"norm": "torch"}, LONG),
            ({"norm": "of squares"}, {}),
            ({"mlp": "formula"}, {}),
            ({"mlp": "formula"}, BF16),
            ({"optimizer": "in another order"}, {}),
            ({"optimizer": "SGD, fused"}, {"optimizer": "SGD"}),
            ({"optimizer": "groups in another order"}, {"optimizer": "groups"}),
            ({"optimizer": "groups of one decay"}, {"optimizer": "groups, one of all"}),
            ({"loss": "apart"}, {"loss": "whole"}),
            ({"clip": "of lists"}, {"clip": "all"}),
        )
    ),
    *(
        _layers(False, actual, *common)
        for actual, *common in (
            ({"attention": "other groups"}, {}),
            ({"attention": "other groups"}, F64),
            ({"attention": "other groups"}, BF16),
            ({"attention": "other groups"}, AUTOCAST),
            ({"attention": "not transposed"}, {}),
            ({"norm": "eps"}, {"norm": "torch"}),
            ({"norm": "eps"}, {"norm": "torch"}, F64),
            ({"norm": "unbiased"}, {}),
            ({"norm": "unbiased"}, AUTOCAST),
            ({"mlp": "swapped"}, {}),
            ({"mlp": "swapped"}, BF16),
            ({"mlp": "swapped", "attention": "grouped"}, {}),
            ({"mlp": "GELU"}, {}),
            ({"mlp": "read in turns"}, {"mlp": "fused"}),
            ({"embedding": "shifted"}, {}),
            ({"optimizer": "groups, swapped"}, {"optimizer": "groups"}),
            ({"loss": "another weight"}, {"loss": "apart"}),
            ({"optimizer": "Adam"}, {}),
            ({"optimizer": "one is missing"}, {}),
            ({"optimizer": "one is missing"}, SMALL),
            ({"optimizer": "no decay"}, SMALL),
            ({"clip": "each"}, {"clip": "all"}),
            ({"clip": "all"}, {}),
            (AUTOCAST, {}),
        )
    ),
]


def _field(is_healthy: bool, field: str, kind: str, said: str = "", against: str = "") -> Pair:
    """``said``: "missing" where tensors are on one side alone, and have to be accepted."""
    accept = "missing" if is_healthy and said == "missing" else ""
    text = f" against {against}" if against else ""
    options = {"field": field, "kind": kind}, {"field": field, "kind": against}
    said = "" if accept else said
    return Pair(f"{field}, {kind}{text}", is_healthy, *options, accept, said, train_field)


FIELDS = [
    _field(True, "images", "pad", "missing"),
    _field(True, "diffusion", "a power", "rounding: step"),
    _field(True, "recurrent", "cells", "missing"),
    _field(True, "recurrent", "two halves", "missing"),
    _field(True, "experts", "each reads all rows", "missing"),
    _field(True, "averaged", "lerp"),
    _field(True, "adapted", "merged", "missing"),
    _field(True, "dropout", "recomputed", "identical"),
    _field(True, "calls", "halves", "missing", "whole"),
    _field(True, "calls", "quarters", "that one side has in parts", "halves"),
    _field(True, "calls", "uneven", "missing", "whole"),
    _field(False, "images", "reflected pad", "first · forward · input", "pad"),
    _field(False, "images", "momentum", "norm.running_mean"),
    _field(False, "diffusion", "a step later", "time · forward · input"),
    _field(False, "diffusion", "another end", "time · forward · input"),
    _field(False, "diffusion", "cosines first", "time · forward · input"),
    _field(False, "recurrent", "gates", "head · forward · input", "cells"),
    _field(False, "recurrent", "state lost", "lstm · forward", "two halves"),
    _field(False, "recurrent", "state detached", "gradients NO", "two halves"),
    _field(False, "experts", "shares as they are", "head · forward · input"),
    _field(False, "experts", "shares detached", "gradients NO"),
    _field(False, "experts", "rows left out", "forward NO"),
    _field(False, "experts", "rows left out", "forward NO", "each reads all rows"),
    _field(False, "averaged", "slower", "teacher"),
    _field(False, "adapted", "another scale", "head · forward · input"),
    _field(False, "dropout", "recomputed with other dropout", "gradients NO"),
    _field(False, "calls", "swapped", "head · forward · input", "whole"),
    _field(False, "calls", "one twice", "mlp", "whole"),
]
DUMP: dict[str, Any] = {"dump": True, "steps": 1}
ORDER = "do not tell the order of the elements"
SWAPPED = {
    f"model.layers.*.self_attn.{one}_proj": f"model.layers.*.self_attn.{other}_proj"
    for one, other in ("qk", "kq")
}
OWN = {
    "decoder.layers.*.self_attention.linear_qkv": [
        f"model.layers.*.self_attn.{kind}_proj" for kind in "qkv"
    ],
    "decoder.layers.*.mlp.linear_fc1": [
        f"model.layers.*.mlp.{kind}_proj" for kind in ("gate", "up")
    ],
    "decoder.layers.*.self_attention.linear_proj": "model.layers.*.self_attn.o_proj",
    "decoder.layers.*.self_attention": "model.layers.*.self_attn",
    "decoder.layers.*.mlp.linear_fc2": "model.layers.*.mlp.down_proj",
    "decoder.layers.*.pre_mlp_layernorm": "model.layers.*.post_attention_layernorm",
    "decoder.final_layernorm": "model.norm",
    "decoder": "model",
    "embedding.word_embeddings": "model.embed_tokens",
    "output_layer": "lm_head",
}


def _layout(
    layout: str, fault: str = "", said: str = "", against: Options | None = None, **options: Any
) -> Pair:
    """Against the whole model on one rank, which ``against`` may be instead."""
    rename = options.pop("rename", "megatron" if layout == "megatron" else None)
    own = {"layout": layout, **options, **({"fault": fault} if fault else {})}
    common = {key: value for key, value in options.items() if key in DUMP}
    reference = {**common, **(against or {})}
    parts = [layout or "whole", *([str(options["ranks"])] if "ranks" in options else [])]
    if "dump" in options:
        parts.append("values")
    text = " ".join(parts) + (f" against {against['layout']}" if against else "")
    if rename not in (None, "megatron"):
        text += ", a wrong map" if rename is SWAPPED else ", a map of one's own"
    name = f"{text}, {fault}" if fault else text
    is_healthy = not fault and rename is not SWAPPED
    return Pair(name, is_healthy, own, reference, "", said, train_layout, rename)


LAYOUTS = [
    _layout("tp", said=ORDER),
    _layout("tp", **DUMP),
    _layout("tp", ranks=4),
    _layout("tp", against={"layout": "tp", "ranks": 4}),
    _layout("tp", against={"layout": "pp"}),
    _layout("tp", against={"layout": "dtensor"}),
    _layout("", against={"layout": "tp"}),
    _layout("", against={"layout": "pp"}),
    _layout("megatron"),
    _layout("megatron", ranks=1),
    _layout("megatron", said="has its parts in 4 groups", **DUMP),
    _layout("megatron", rename=OWN),
    _layout("megatron", rename=OWN, **DUMP),
    _layout("megatron", against={"layout": "tp"}),
    _layout("megatron", against={"layout": "pp"}),
    _layout("pp", said="identical"),
    _layout("pp", said="identical", **DUMP),
    _layout("pp", ranks=4, said="identical"),
    _layout("pp", against={"layout": "pp", "ranks": 4}),
    _layout("dtensor"),
    _layout("dtensor", **DUMP),
    _layout("fsdp2"),
    _layout("fsdp2", ranks=4),
    _layout("fsdp2", against={"layout": "fsdp2", "ranks": 4}),
    _layout("fsdp2", against={"layout": "dtensor"}),
    _layout("ddp"),
    _layout("ddp", against={"layout": "fsdp2"}),
    *(
        _layout("tp", fault, f"first at step 0: {said}")
        for fault, said in {
            "the shard of rank 0": "model.layers.2.mlp.gate_proj · optimizer",
            "q and k swapped": "model.layers.1.self_attn.q_proj · optimizer",
            "bias on each rank": "model.layers.1.self_attn.o_proj · forward · output",
            "not reduced": "model.layers.1.mlp.down_proj · forward · output",
            "reduced twice": "model.layers.2.self_attn.o_proj · forward · output",
            "rows of rank 0": "model.embed_tokens · forward · output",
            "scale": "model.layers.1.self_attn.o_proj · forward · input",
            "gradient is not reduced": "model.layers.2.post_attention_layernorm · backward",
            "shards swapped": "model.layers.1.mlp.down_proj · forward · input",
            "columns swapped": "model.layers.2.self_attn.o_proj · forward · output",
        }.items()
    ),
    *(
        _layout("tp", fault, f"first at step 0: {said}", **DUMP)
        for fault, said in {
            "shards swapped": "model.layers.1.mlp.up_proj · optimizer",
            "columns swapped": "model.layers.2.self_attn.o_proj · optimizer",
            "not reduced": "model.layers.1.mlp.down_proj · forward · output",
        }.items()
    ),
    *(
        _layout("megatron", fault, f"first at step 0: decoder.layers.{said}", **DUMP)
        for fault, said in {
            "q and k swapped": "1.self_attention.linear_qkv · optimizer",
            "gate and up swapped": "2.mlp.linear_fc1 · optimizer",
            "q, k, v one below the other": "1.self_attention.linear_qkv · optimizer",
        }.items()
    ),
    _layout("megatron", "q and k swapped", "decoder.layers.1.self_attention.linear_proj · forward"),
    _layout("pp", "layers of stage 0", "weights are swapped: model.layers.2."),
    _layout("pp", "a layer is left out", "optimizers[0].groups[0].parameters.model.layers.3."),
    _layout("pp", "gradient doubled", "first at step 0: model.layers.1 · backward"),
    _layout("fsdp2", "one weight is not loaded", "model.layers.1.mlp.up_proj · optimizer"),
    _layout("fsdp2", "summed over the ranks", "gradients NO"),
    _layout("dtensor", "one weight is not loaded", "model.layers.1.mlp.up_proj · optimizer"),
    _layout("pp", rename=SWAPPED, said="the names are wrong, not the weights"),
    _layout("tp", rename=SWAPPED, said="the names are wrong, not the weights", **DUMP),
]
ANOTHER = "another schedule of the same step"


def _schedule(is_healthy: bool, name: str, said: str = "") -> Pair:
    return Pair(name, is_healthy, {"schedule": name}, said=said, run=dump_schedule)


def _noise(is_healthy: bool, schedule: str, said: str, repeat: Options | None) -> Pair:
    name = f"{schedule}, {'a second run' if repeat else 'alone'}"
    actual, reference = {"schedule": schedule, "seed": 1}, {"schedule": "noise", "seed": 2}
    return Pair(name, is_healthy, actual, reference, "", said, dump_schedule, None, repeat)


SCHEDULES = [
    _schedule(True, "reversed", ANOTHER),
    _schedule(True, "rounds otherwise", ANOTHER),
    _schedule(True, "rounds otherwise, reversed", ANOTHER),
    _schedule(True, "casts", ANOTHER),
    _schedule(True, "a view more", ANOTHER),
    _schedule(True, "recomputed", "identical"),
    _schedule(False, "recomputed with other dropout", "first.dropout.aten."),
    _schedule(False, "another weight", "first.aten.mul.Tensor · forward"),
    _schedule(False, "a branch is left out", "first.aten.sigmoid · forward"),
    _schedule(False, "bfloat16", "first.aten.mm · forward"),
    _noise(False, "noise", "forward NO", None),
    _noise(True, "noise", "are not deterministic, as repeat= shows", {"schedule": "noise"}),
    _noise(False, "noise and another scale", "forward NO", {"schedule": "noise"}),
]
PAIRS += [*RESUMED, *SPLIT, *LAYERS, *FIELDS, *LAYOUTS, *SCHEDULES]
CASE_PAIRS = [
    Pair(f"case {number}, {text}", False, {"fault": number}, {}, "", said, train_case, exact=exact)
    if number != 20
    else Pair(
        f"case {number}, {text}",
        False,
        {"fault": "steps of Adam"},
        {"fault": "whole"},
        said=said,
        run=train_resumed,
    )
    for number, (text, said, exact) in CASES.items()
]
PAIRS += [
    Pair(
        "recomputed, another rotation", True, {"fault": -5}, said="rounding: step", run=train_case
    ),
    *CASE_PAIRS,
]
#: A sample, for the tests.
CHECKED = (
    "SDPA",
    "SDPA, bfloat16",
    "q, k, v in one",
    "fused AdamW",
    "channels_last",
    "rows flipped, labels too",
    "eps of the norm",
    "a temperature within the model",
    "weights put back",
    "images, another range",
    "two heads swapped",
    "transposed gradient",
    "frozen, rate 1e-06",
    "recomputed, another rotation",
    "case 3, a transpose is missing where it is recomputed",
    "case 28, a cached offset of positions is not reset",
    "one element of a weight",
    "images, transposed",
    "resumed",
    "resumed later",
    "resumed, one weight",
    "resumed, steps of Adam",
    "resumed, learning rate",
    "resumed, a batch left out",
    "4 parts",
    "2 parts, clipped",
    "4 parts, mean of means",
    "4 parts, the sum is lost",
    "4 parts, frozen",
    "autocast True, attention grouped",
    "optimizer groups in another order",
    "optimizer groups of one decay",
    "optimizer groups, swapped",
    "loss apart",
    "loss another weight",
    "recurrent, state detached against two halves",
    "experts, each reads all rows",
    "experts, rows left out against each reads all rows",
    "calls, quarters against halves",
    "calls, uneven against whole",
    "calls, swapped against whole",
    "2 ranks, another weight on rank 1",
    "2 ranks, one gradient is not reduced, against 2",
    "2 ranks, the batch of rank 0, against 2",
    "2 ranks, learning rate of rank 1",
    "ddp against fsdp2",
    "dtype torch.float64, norm torch",
    "norm eps",
    "tp",
    "megatron values",
    "pp",
    "fsdp2",
    "tp, not reduced",
    "tp values, shards swapped",
    "pp, layers of stage 0",
    "pp, a wrong map",
    "rounds otherwise, reversed",
    "casts",
    "another weight",
    "noise, a second run",
    "noise and another scale, a second run",
)


def judge(pair: Pair, logs: Path) -> dict[str, Any]:
    """What compare() says of it, and whether that is right."""
    sides = [_log(pair.run, options, logs) for options in (pair.actual, pair.reference)]
    repeat = None
    if pair.repeat is not None:
        repeat = _log(pair.run, {**pair.repeat, "seed": 3}, logs)
    found = fastcheck.compare(*sides, rename=pair.rename, repeat=repeat, exact=pair.exact)
    report = str(found)
    is_right = found.agrees == pair.is_healthy
    if pair.accept:
        accepted = fastcheck.compare(*sides, accept=pair.accept).agrees
        is_right = accepted and not found.agrees and f"--accept {pair.accept}" in _flat(report)
    elif not pair.is_healthy and "If this order is intended, use --accept order" in _flat(report):
        # Advice that may be followed of a wrong pair has to leave it different.
        is_right &= not fastcheck.compare(*sides, accept="order").agrees
    is_right &= pair.said in _flat(report)
    first = None if found.first is None else f"step {found.first.row.step}: {found.first.row.name}"
    return {
        "pair": pair.name,
        "is_healthy": pair.is_healthy,
        "verdict": found.verdict,
        "first": first,
        "benign": sum(counts.get("different", 0) for counts in found.counts.values()),
        "is_right": is_right,
    }


def _flat(report: str) -> str:
    return " ".join(report.split())


def _log(run: Callable[..., None], options: Options, logs: Path) -> Path:
    name = "_".join([run.__name__, *(f"{key}-{options[key]}" for key in sorted(options))])
    log = logs / name.replace(" ", "-")
    if not log.exists():
        run(log, **options)
    return log


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="pairs that have this in their name")
    parser.add_argument("--keep", type=Path, help="a directory for the logs")
    options = parser.parse_args()
    torch.set_num_threads(1)
    pairs = [pair for pair in PAIRS if options.only in pair.name]
    if harness.IS_SMOKE:
        pairs = [pair for pair in pairs if pair.name in CHECKED]
    with tempfile.TemporaryDirectory() as temporary:
        logs = options.keep or Path(temporary)
        rows = [judge(pair, logs) for pair in pairs]
    for row in rows:
        if not row["is_right"]:
            print(f"not right: {row['pair']}: {row['verdict']}, {row['first']}")
    for is_healthy, text in ((True, "healthy pairs equal"), (False, "wrong pairs different")):
        own = [row for row in rows if row["is_healthy"] == is_healthy]
        print(f"{sum(row['is_right'] for row in own)} of {len(own)} {text}")
    benign = max((row["benign"] for row in rows if row["is_healthy"]), default=0)
    print(f"at most {benign} differences in a healthy pair")
    harness.write_results("compare_sides", rows)
    return 0 if all(row["is_right"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
