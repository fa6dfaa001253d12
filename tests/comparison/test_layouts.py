"""Names of other programs, and tensors that one side has in parts. Whole runs are in test_sides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fastcheck
from accuracy.sides_layouts import LAYERS, fused, shard, whole_state
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
            "vllm",
            f"{LAYER}block_sparse_moe.experts.routed_experts.w13_weight",
            [
                f"{LAYER}block_sparse_moe.experts.{expert}.{kind}.weight"
                for expert in (0, 1)
                for kind in ("w1", "w3")
            ],
        ),
        (
            "vllm",
            f"{LAYER}block_sparse_moe.experts.routed_experts.w2_weight",
            [f"{LAYER}mlp.experts.down_proj"],
        ),
        ("vllm", f"{LAYER}block_sparse_moe.gate.weight", [f"{LAYER}mlp.gate.weight"]),
        (
            "megatron",
            f"{MEGATRON}mlp.shared_experts.linear_fc1.weight",
            [f"{LAYER}mlp.shared_expert.{x}_proj.weight" for x in ("gate", "up")],
        ),
        (
            "megatron",
            f"{MEGATRON}mlp.shared_experts.gate_weight",
            [f"{LAYER}mlp.shared_expert_gate.weight"],
        ),
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


# ---- checkpoints --------------------------------------------------------------------------------


def by_rank(state: dict[str, torch.Tensor], ranks: int) -> list[dict[str, torch.Tensor]]:
    return [
        {name: shard(name, value, rank, ranks) for name, value in state.items()}
        for rank in range(ranks)
    ]


def of_vllm(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The projections of a rank one below the other."""
    made = dict(state)
    for number in range(LAYERS):
        for place, whole, kinds in (
            ("self_attn", "qkv_proj", ("q_proj", "k_proj", "v_proj")),
            ("mlp", "gate_up_proj", ("gate_proj", "up_proj")),
        ):
            path = f"model.layers.{number}.{place}"
            parts = [made.pop(f"{path}.{kind}.weight") for kind in kinds]
            made[f"{path}.{whole}.weight"] = torch.cat(parts)
    return made


def test_shards_are_joined_to_the_bit() -> None:
    whole = whole_state()
    for ranks in (2, 4):
        for sides in ((by_rank(whole, ranks), whole), (whole, by_rank(whole, ranks))):
            found = fastcheck.compare(*sides)
            assert found.verdict == "identical"
            assert found.counts["weights"] == {"same": len(whole)}
    assert fastcheck.compare(by_rank(whole, 2), by_rank(whole, 4)).verdict == "identical"


@pytest.mark.parametrize(
    ("name", "relation"),
    [
        ("model.layers.1.mlp.up_proj.weight", "rows in another order"),
        ("model.layers.2.self_attn.o_proj.weight", "columns in another order"),
    ],
)
def test_a_shard_on_the_wrong_rank_is_named(name: str, relation: str) -> None:
    ranks = by_rank(whole_state(), 2)
    ranks[0][name], ranks[1][name] = ranks[1][name], ranks[0][name]
    found = fastcheck.compare(ranks, whole_state())
    assert [(row.name, row.relation) for row in found.rows] == [(name, relation)]


def test_a_replica_that_differs_on_one_rank_is_found() -> None:
    ranks = by_rank(whole_state(), 2)
    ranks[1]["model.norm.weight"][3] += 0.5
    found = fastcheck.compare(ranks, whole_state())
    assert [row.name for row in found.rows] == ["model.norm.weight"]
    assert "element 3 differs" in found.rows[0].relation


def test_fused_weights_of_ranks_against_separate_ones(tmp_path: Path) -> None:
    whole = whole_state()
    ranks = [of_vllm(state) for state in by_rank(whole, 2)]
    found = fastcheck.compare(ranks, whole, rename="vllm")
    assert found.verdict == "identical"
    assert any("has its parts in 2 groups" in note for note in found.notes)
    for rank, state in enumerate(ranks):
        torch.save(state, tmp_path / f"model-rank-{rank}.pt")
    assert fastcheck.compare(tmp_path, whole, rename="vllm").verdict == "identical"
    name = "model.layers.1.self_attn.qkv_proj.weight"
    q, k, v = ranks[0][name].chunk(3)
    ranks[0][name] = torch.cat([k, q, v])
    found = fastcheck.compare(ranks, whole, rename="vllm")
    assert [(row.name, row.relation) for row in found.rows] == [(name, "rows in another order")]


def test_a_map_that_neither_side_needs_changes_nothing() -> None:
    whole = whole_state()
    assert fastcheck.compare(whole, whole, rename="vllm").counts["weights"] == {"same": len(whole)}
    changed = {**whole, "model.layers.1.self_attn.k_proj.weight": torch.zeros(32, 32)}
    found = fastcheck.compare(changed, whole, rename="vllm")
    assert [row.name for row in found.rows] == ["model.layers.1.self_attn.qkv_proj.weight (part 1)"]


def test_a_wrong_map_of_checkpoints_is_said() -> None:
    whole = whole_state()
    wrong = {
        f"model.layers.*.self_attn.{a}_proj": f"model.layers.*.self_attn.{b}_proj"
        for a, b in ("qk", "kq")
    }
    found = fastcheck.compare(whole, whole, rename=wrong)
    assert {row.relation for row in found.rows if "0.self_attn.q" in row.name} == {
        "it is what model.layers.0.self_attn.k_proj.weight is in reference"
    }


def test_experts_are_one_below_the_other() -> None:
    path = "model.layers.0.block_sparse_moe.experts"
    torch.manual_seed(0)
    whole = {
        f"{path}.{expert}.{kind}.weight": torch.randn(6, 4).T if kind == "w2" else torch.randn(6, 4)
        for expert in range(12)
        for kind in ("w1", "w2", "w3")
    }
    fused = {
        f"{path}.w13_weight": torch.stack(
            [
                torch.cat([whole[f"{path}.{expert}.{kind}.weight"] for kind in ("w1", "w3")])
                for expert in range(12)
            ]
        ),
        f"{path}.w2_weight": torch.stack([whole[f"{path}.{n}.w2.weight"] for n in range(12)]),
    }
    assert fastcheck.compare(fused, whole, rename="vllm").verdict == "identical"
    assert fastcheck.verify(fused, fastcheck.receipt(whole), map="vllm").equal == 36
    fused[f"{path}.w13_weight"][[3, 4]] = fused[f"{path}.w13_weight"][[4, 3]]
    found = fastcheck.compare(fused, whole, rename="vllm")
    assert [row.name for row in found.rows] == ["model.layers.0.mlp.experts.w13_weight"]
    arrived = fastcheck.verify(fused, fastcheck.receipt(whole), map="vllm")
    assert f"it is {path}.4.w1.weight of the receipt" in arrived.differing[f"{path}.w13_weight"]


def test_weights_fused_head_by_head_arrive() -> None:
    whole = whole_state()
    made = fastcheck.receipt(whole)
    found = fastcheck.verify(fused(whole), made, map="megatron")
    assert found and found.equal == len(whole)
    found = fastcheck.verify(fused(whole, "q and k swapped"), made, map="megatron")
    assert list(found.differing) == ["decoder.layers.1.self_attention.linear_qkv.weight"]


def padded(state: dict[str, torch.Tensor], rows: int) -> dict[str, torch.Tensor]:
    """Behind the rows of the vocabulary others that no word has; of rows below 0 so many less."""
    made = dict(state)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        value = made[name]
        more = value[:0] if rows < 0 else torch.randn(rows, value.shape[1])
        made[name] = torch.cat([value[: rows if rows < 0 else None], more])
    return made


def test_padding_behind_the_vocabulary_is_left_out() -> None:
    """vLLM and Megatron-Core pad, so that ranks have multiples of something."""
    whole = whole_state()
    for ranks in (1, 2):
        sides = [of_vllm(rank) for rank in by_rank(padded(whole, 16), ranks)], whole
        for actual, reference in (sides, sides[::-1]):
            found = fastcheck.compare(actual, reference, rename="vllm")
            assert found.verdict == "identical", str(found)
            (note,) = (note for note in found.notes if "padding" in note)
            assert note == (
                "the padding behind the vocabulary is left out: 16 rows of "
                "model.embed_tokens.weight, and of 1 more"
            )


def test_wrong_padding_is_found() -> None:
    whole = whole_state()
    cut = [of_vllm(rank) for rank in by_rank(padded(whole, -2), 2)]
    found = fastcheck.compare(cut, whole, rename="vllm")
    assert found.verdict == "different" and found["weights"].text.startswith("2 of ")
    moved = padded(whole, 16)
    moved["lm_head.weight"] = moved["lm_head.weight"].roll(16, 0)
    found = fastcheck.compare([of_vllm(rank) for rank in by_rank(moved, 2)], whole, rename="vllm")
    assert found["weights"].text.startswith("1 of "), str(found)
    assert [row.name for row in found.rows] == ["lm_head.weight"]


def log_padded(log: Path, rows: int, fill: float = 0.0, scale: float = 1.0) -> Path:
    """A log of three steps of a model of 12 words, whose tables have ``rows`` of padding."""
    torch.manual_seed(0)
    tables = torch.randn(2, 12, 8)
    model, body, embedding = torch.nn.Module(), torch.nn.Module(), torch.nn.Embedding(12 + rows, 8)
    head = torch.nn.Linear(8, 12 + rows, bias=False)
    body.embed_tokens, model.model, model.lm_head = embedding, body, head
    for held, table in zip((embedding, head), tables):
        held.weight.data = torch.cat([table * scale, torch.full((rows, 8), fill)])
    model.forward = lambda ids: head(embedding(ids))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    torch.manual_seed(1)
    with fastcheck.install(model, log_dir=log):
        for _ in range(3):
            ids = torch.randint(0, 12, (4, 7))
            optimizer.zero_grad()
            logits = model(ids[:, :-1])[..., :12]
            criterion = torch.nn.functional.cross_entropy
            loss: Any = criterion(logits.flatten(0, 1), ids[:, 1:].flatten())
            loss.backward()
            optimizer.step()
    return log


def test_padding_in_logs_is_left_out_where_it_is_zeros(tmp_path: Path) -> None:
    plain, other = (log_padded(tmp_path / f"{rows}", rows) for rows in (0, 4))
    for sides in ((other, plain), (plain, other)):
        found = fastcheck.compare(*sides, rename="vllm")
        assert found.agrees and not found.missing, str(found)
        (note,) = (note for note in found.notes if "padding" in note)
        assert "32 zeros of model.embed_tokens" in note
    for name, options in {"filled": {"fill": 0.5}, "scaled": {"scale": 1.001}}.items():
        wrong = fastcheck.compare(log_padded(tmp_path / name, 4, **options), plain, rename="vllm")
        assert wrong["initial weights"].answer == "no", str(wrong)
        said = any("zeros of model.embed_tokens" in note for note in wrong.notes)
        assert said == (name == "scaled")


def test_padding_of_a_side_without_fused_names_is_of_equal_rows() -> None:
    """Rows that are not alike may be the ones that the other side has lost."""
    whole = whole_state()
    zeros = dict(whole)
    zeros["lm_head.weight"] = torch.nn.functional.pad(whole["lm_head.weight"], (0, 0, 0, 8))
    assert fastcheck.compare(by_rank(zeros, 2), whole).verdict == "identical"
    assert fastcheck.compare(by_rank(padded(whole, 8), 2), whole).verdict == "different"
