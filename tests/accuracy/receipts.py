"""Holds weights that were sent to the receipt of their sender: 65 that arrived otherwise, and the
same models where everything is right.

    make accuracy SUITE=receipts

Writes bench/results/receipts.json. Of each fault the text has to say what is wrong, at the weight
that it is wrong with and at no other; a clean arrival has to be verified. The exit status is 1
otherwise.
"""

from __future__ import annotations

import copy
import io
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Callable

import torch
from torch import nn

import fastcheck
import harness

Weights = dict[str, torch.Tensor]
#: What a fault does to weights, given those of before; the names it spoils, and what is said.
Fault = Callable[[Weights, Weights], dict[str, str]]


def _moved(model: nn.Module, seed: int) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    state: Weights = {}
    for name, value in model.state_dict().items():
        noise = torch.randn(value.shape, generator=generator)
        state[name] = value + noise.to(value.dtype) if value.is_floating_point() else value.clone()
    return state


class _Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(32, 4)
        self.experts = nn.Parameter(torch.zeros(4, 64, 32))
        self.scale = nn.Parameter(torch.zeros(()))


def _attention(dtype: torch.dtype) -> nn.Module:
    sizes = {"q_proj": 96, "k_proj": 48, "v_proj": 48, "gate_proj": 160, "up_proj": 160}
    layers = {name: nn.Linear(64, size) for name, size in sizes.items()}
    return nn.ModuleDict({**layers, "o_proj": nn.Linear(96, 96), "norm": nn.LayerNorm(64)}).to(
        dtype
    )


def _images() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 32, 3), nn.Linear(80, 80)
    )


#: A model, its largest square matrix, two weights of one shape, and one small weight.
MODELS: dict[str, tuple[nn.Module, str, tuple[str, str], str]] = {
    "float32": (
        _attention(torch.float32),
        "o_proj.weight",
        ("k_proj.weight", "v_proj.weight"),
        "norm.weight",
    ),
    "bfloat16": (
        _attention(torch.bfloat16),
        "o_proj.weight",
        ("gate_proj.bias", "up_proj.bias"),
        "norm.bias",
    ),
    "float64": (
        _attention(torch.float64),
        "o_proj.weight",
        ("gate_proj.weight", "up_proj.weight"),
        "norm.weight",
    ),
    "images": (_images(), "3.weight", ("1.weight", "1.bias"), "1.running_var"),
    "experts": (_Experts(), "experts", ("router.weight", "router.weight"), "scale"),
}


def _change(name: str, said: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Fault:
    def fault(weights: Weights, before: Weights) -> dict[str, str]:
        weights[name] = change(weights[name].clone())
        return {name: said}

    return fault


def _written(tensor: torch.Tensor, start: int, value: Any) -> torch.Tensor:
    tensor[start:] = value
    return tensor


def _last_bit(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.view(-1)
    flat[-1] = torch.nextafter(flat[-1], torch.full_like(flat[-1], torch.inf))
    return tensor


def faults(model: str) -> Iterator[tuple[str, Fault]]:
    """Each with its name."""
    _, large, (one, other), small = MODELS[model]
    shape = MODELS[model][0].state_dict()[large].shape
    rows, half = shape[0], shape[0] // 2
    kind = "float16" if model == "bfloat16" else "bfloat16"

    def old(weights: Weights, before: Weights) -> dict[str, str]:
        weights[small] = before[small]
        return {small: "old: as in the receipt before"}

    def half_old(weights: Weights, before: Weights) -> dict[str, str]:
        weights[large] = torch.cat([weights[large][:half], before[large][half:]])
        return {large: "are old"}

    def missing(weights: Weights, before: Weights) -> dict[str, str]:
        del weights[large]
        return {large: "missing"}

    def swapped(weights: Weights, before: Weights) -> dict[str, str]:
        weights[one], weights[other] = weights[other], weights[one]
        return {one: f"it is {other} of the receipt", other: f"it is {one} of the receipt"}

    yield "old", old
    yield "half old", half_old
    yield "missing", missing
    if one != other:
        yield "swapped", swapped
        yield "one twice", _copied(one, other)
    yield "cast", _change(large, f"to {kind}", lambda t: t.to(getattr(torch, kind)))
    yield "half zeros", _change(large, "are zeros", lambda t: _written(t, half, 0))
    yield (
        "NaN in the last rows",
        _change(large, "other values in rows", lambda t: _written(t, rows - 1, torch.nan)),
    )
    yield "last bit", _change(large, "other values", _last_bit)
    yield "rows in another order", _change(large, "other values", lambda t: t.roll(1, 0))
    yield "columns in another order", _change(large, "other values", lambda t: t.roll(1, -1))
    is_scalar = MODELS[model][0].state_dict()[small].numel() == 1
    what = "each element is" if is_scalar else "other values"
    yield "negated", _change(small, what, torch.neg)
    yield (
        "another shape",
        _change(large, "the same elements in the shape", lambda t: t.reshape(2, -1)),
    )
    if len(shape) > 2:
        yield (
            "transposed",
            _change(large, "transposed: dim", lambda t: t.transpose(0, 1).contiguous()),
        )
        yield (
            "shape of a transpose",
            _change(large, "transposed: dim", lambda t: t.transpose(1, 2).contiguous()),
        )
    if len(shape) == 2:
        yield "transposed", _change(large, "transposed", lambda t: t.t().contiguous())
        yield "cut off", _change(large, "its shape is", lambda t: t[:, :-1])
    if model in ("float32", "float64"):
        yield "rounded", _change(large, "rounded to", lambda t: t.bfloat16().to(t.dtype))


def _copied(source: str, target: str) -> Fault:
    def fault(weights: Weights, before: Weights) -> dict[str, str]:
        weights[target] = weights[source]
        return {target: f"it is {source} of the receipt"}

    return fault


def arrivals(weights: Weights, folder: Path) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Ways in which weights arrive that change none: the name, what arrives, and the options."""
    yield "the same", weights, {}
    yield "copies", copy.deepcopy(weights), {}
    yield "in another order", dict(reversed(weights.items())), {}
    yield (
        "with gradients",
        {n: nn.Parameter(v, v.is_floating_point()) for n, v in weights.items()},
        {},
    )
    yield "columns first in memory", {n: _strided(v) for n, v in weights.items()}, {}
    yield "parts of one buffer", _in_one_buffer(weights), {}
    stream = io.BytesIO()
    torch.save(weights, stream)
    stream.seek(0)
    yield "through bytes", torch.load(stream), {}
    torch.save(weights, folder / "model.pt")
    yield "a checkpoint", str(folder / "model.pt"), {}
    yield (
        "under other names",
        {f"module.{name}": value for name, value in weights.items()},
        {"map": {"module.*": "*"}},
    )
    yield "with more beside", {**weights, "extra": torch.ones(3)}, {}
    wide = {n: v.double() if v.is_floating_point() else v for n, v in weights.items()}
    yield "wider", wide, {"accept": ("dtype",)}
    if all(f"{part}_proj.weight" in weights for part in ("q", "k", "v")):
        yield "fused", _fused(weights), {"map": "vllm"}
    if all(v.dtype != torch.bfloat16 for v in weights.values()):
        narrow = {n: v.bfloat16() if v.is_floating_point() else v for n, v in weights.items()}
        yield "cast, as accepted", narrow, {"accept": ("dtype",)}


def _strided(value: torch.Tensor) -> torch.Tensor:
    if value.dim() == 4:
        return value.to(memory_format=torch.channels_last)
    return value.transpose(0, -1).contiguous().transpose(0, -1) if value.dim() else value


def _in_one_buffer(weights: Weights) -> Weights:
    return {
        name: torch.cat([value.reshape(-1), value.reshape(-1)])[: value.numel()].view(value.shape)
        for name, value in weights.items()
    }


def _fused(weights: Weights) -> Weights:
    weights = dict(weights)
    for name, parts in {"qkv_proj": "qkv", "gate_up_proj": ("gate", "up")}.items():
        for kind in ("weight", "bias"):
            sources = [weights.pop(f"{part}_proj.{kind}") for part in parts]
            weights[f"{name}.{kind}"] = torch.cat(sources)
    return weights


def _is_named(found: Any, expected: Mapping[str, str]) -> bool:
    told = {**found.differing, **dict.fromkeys(found.missing, "missing")}
    return (
        not found
        and set(told) == set(expected)
        and all(said in told[name] for name, said in expected.items())
    )


def main() -> int:
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for kind, (model, *_) in MODELS.items():
            before, sent = _moved(model, 0), _moved(model, 1)
            receipt = fastcheck.receipt(sent, before=fastcheck.receipt(before))
            for name, fault in faults(kind):
                weights = dict(sent)
                expected = fault(weights, before)
                found = fastcheck.verify(weights, receipt)
                rows.append({"model": kind, "fault": name, "right": _is_named(found, expected)})
                if not rows[-1]["right"]:
                    print(f"{kind}, {name}: expected {expected}, got\n{found}")
            for name, arrived, options in arrivals(sent, Path(folder)):
                found = fastcheck.verify(arrived, receipt, **options)
                rows.append({"model": kind, "arrival": name, "right": bool(found)})
                if not found:
                    print(f"{kind}, {name}: accused\n{found}")
    for what in ("fault", "arrival"):
        of_kind = [row for row in rows if what in row]
        print(f"{what}s: {sum(row['right'] for row in of_kind)} of {len(of_kind)} right")
    harness.write_results("receipts", rows)
    return 0 if all(row["right"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
