"""Names of other programs, and tensors that one side has in parts. Whole runs are in test_sides."""

from __future__ import annotations

import pytest

import fastcheck
from fastcheck.comparison.names import Renaming

LAYER = "model.layers.3."
MEGATRON = "decoder.layers.3."


@pytest.mark.parametrize(
    ("program", "own", "parts"),
    [
        (
            "vllm",
            f"{LAYER}self_attn.qkv_proj.bias",
            [f"{LAYER}self_attn.{x}_proj.bias" for x in "qkv"],
        ),
        ("vllm", "mlp.gate_up_proj.weight", ["mlp.gate_proj.weight", "mlp.up_proj.weight"]),
        (
            "vllm",
            f"{LAYER}block_sparse_moe.experts.w13_weight",
            [
                f"{LAYER}block_sparse_moe.experts.{expert}.{kind}.weight"
                for expert in (0, 1, 10)
                for kind in ("w1", "w3")
            ],
        ),
        ("vllm", "mlp.experts.w13_weight", ["mlp.experts.gate_up_proj"]),
        (
            "megatron",
            f"{MEGATRON}self_attention.linear_qkv.weight",
            [f"{LAYER}self_attn.{x}_proj.weight" for x in "qkv"],
        ),
        (
            "megatron",
            f"{MEGATRON}self_attention.linear_qkv.layer_norm_weight",
            [f"{LAYER}input_layernorm.weight"],
        ),
        (
            "megatron",
            f"{MEGATRON}mlp.experts.linear_fc1.weight7",
            [f"{LAYER}block_sparse_moe.experts.7.{kind}.weight" for kind in ("w1", "w3")],
        ),
        (
            "megatron",
            f"{MEGATRON}mlp.experts.local_experts.7.linear_fc2.weight",
            [f"{LAYER}mlp.experts.7.down_proj.weight"],
        ),
        ("megatron", "output_layer.weight", ["lm_head.weight"]),
    ],
)
def test_a_name_and_its_parts_have_one_name_on_either_side(
    program: str, own: str, parts: list[str]
) -> None:
    actual = Renaming.of(program)
    for renaming in (actual, actual.of_reference()):
        name, _ = renaming.place(own)
        places = [renaming.place(part) for part in parts]
        assert {found for found, _ in places} == {name}
        orders = [order for _, order in places]
        assert orders == sorted(orders)
        assert len(set(orders)) == len(parts)


def test_a_list_of_parts_is_about_both_sides() -> None:
    renaming = Renaming.of({"a.*.qkv": ["b.*.q", "b.*.k"], "a": "c"})
    assert renaming.has_parts
    assert renaming.place("a.0.qkv.weight") == ("a.0.qkv.weight", ())
    assert renaming.place("a.0.norm.weight") == ("c.0.norm.weight", ())
    assert renaming.of_reference().place("b.0.k.weight") == ("a.0.qkv.weight", (1,))
    assert renaming.of_reference().place("a.0.norm.weight") == ("a.0.norm.weight", ())


def test_a_part_needs_each_star_of_the_whole() -> None:
    with pytest.raises(fastcheck.ConfigError, match="need each \\*"):
        Renaming.of({"a.*.qkv": ["b.q", "b.k"]})
