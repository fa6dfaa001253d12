"""Weights that arrive otherwise than they were sent are named, and how; others are not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Callable

import pytest
import torch
from torch import nn

import fastcheck
from fastcheck.sealing import reading
from fastcheck.statistics import functions

Weights = dict[str, torch.Tensor]


class Sender(nn.Module):
    """Weights of several shapes; large ones are read in parts."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.q_proj, self.k_proj = nn.Linear(64, 96), nn.Linear(64, 32)
        self.v_proj, self.o_proj = nn.Linear(64, 32), nn.Linear(64, 64)
        self.gate_proj, self.up_proj = nn.Linear(64, 80), nn.Linear(64, 80)
        self.norm = nn.LayerNorm(64)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))


def rolled(w: Weights, name: str) -> None:
    w[name] = w[name].roll(1, 0)


def halved(w: Weights, name: str, new: Callable[[torch.Tensor], torch.Tensor]) -> None:
    value = w[name].clone()
    value[len(value) // 2 :] = new(value[len(value) // 2 :])
    w[name] = value


def swapped(w: Weights, one: str, other: str) -> None:
    w[one], w[other] = w[other], w[one]


OLD, I32 = Sender(1).state_dict(), torch.int32
LARGE, SMALL = "o_proj.weight", "norm.weight"
FAULTS: list[tuple[str, str, Callable[[Weights], Any]]] = [
    (LARGE, "old: as in the receipt before", lambda w: w.update({LARGE: OLD[LARGE]})),
    (SMALL, "old: as in the receipt before", lambda w: w.update({SMALL: OLD[SMALL]})),
    (LARGE, "cast from float32 to bfloat16", lambda w: w.update({LARGE: w[LARGE].bfloat16()})),
    (SMALL, "cast from float32 to float16", lambda w: w.update({SMALL: w[SMALL].half()})),
    (LARGE, "cast from float32 to float64", lambda w: w.update({LARGE: w[LARGE].double()})),
    (LARGE, "rounded to bfloat16", lambda w: w.update({LARGE: w[LARGE].bfloat16().float()})),
    (
        LARGE,
        "cast from float32 to bfloat16, and old",
        lambda w: w.update({LARGE: OLD[LARGE].bfloat16()}),
    ),
    (LARGE, "transposed", lambda w: w.update({LARGE: w[LARGE].t().contiguous()})),
    ("q_proj.weight", "transposed", lambda w: w.update({"q_proj.weight": w["q_proj.weight"].t()})),
    (
        LARGE,
        "cast from float32 to bfloat16, and transposed",
        lambda w: w.update({LARGE: w[LARGE].t().bfloat16()}),
    ),
    (
        "k_proj.weight",
        "it is v_proj.weight",
        lambda w: swapped(w, "k_proj.weight", "v_proj.weight"),
    ),
    (
        "up_proj.bias",
        "it is gate_proj.bias",
        lambda w: swapped(w, "up_proj.bias", "gate_proj.bias"),
    ),
    (SMALL, "all zeros", lambda w: w.update({SMALL: torch.zeros(64)})),
    (SMALL, "each element is 0.5", lambda w: w.update({SMALL: torch.full((64,), 0.5)})),
    (LARGE, "half written: rows 32 to 47 are zeros", lambda w: halved(w, LARGE, torch.zeros_like)),
    (
        LARGE,
        "half written: rows 32 to 47 are old",
        lambda w: halved(w, LARGE, lambda _: OLD[LARGE][32:]),
    ),
    (LARGE, "other values in rows 48 to 63", lambda w: halved(w, LARGE, lambda x: x + 1)),
    (LARGE, "other values", lambda w: rolled(w, LARGE)),
    (
        LARGE,
        "rows 0 to 15 are rows 32 to 47, rows 32 to 47 are rows 0 to 15; the others",
        lambda w: w.update({LARGE: torch.cat([w[LARGE].chunk(4)[n] for n in (2, 1, 0, 3)])}),
    ),
    (LARGE, "the bits of float32, read as int32", lambda w: w.update({LARGE: w[LARGE].view(I32)})),
    (SMALL, "other values", lambda w: w.update({SMALL: w[SMALL] + 1e-7})),
    (SMALL, "its shape is (32,), expected (64,)", lambda w: w.update({SMALL: w[SMALL][:32]})),
    (
        LARGE,
        "the same elements in the shape",
        lambda w: w.update({LARGE: w[LARGE].reshape(128, 32)}),
    ),
]


@pytest.fixture
def weights() -> Weights:
    return {name: value.clone() for name, value in Sender().state_dict().items()}


@pytest.fixture
def made() -> fastcheck.types.Receipt:
    return fastcheck.receipt(Sender(), before=fastcheck.receipt(OLD))


@pytest.mark.parametrize(("name", "text", "change"), FAULTS, ids=[f"{n} {t}" for n, t, _ in FAULTS])
def test_each_fault_is_named(
    name: str, text: str, change: Callable[[Weights], Any], weights: Weights, made: Any
) -> None:
    change(weights)
    found = fastcheck.verify(weights, made)
    assert not found and text in found.differing[name]
    assert len(found.differing) == (2 if "it is" in text else 1)
    assert found.equal == len(weights) - len(found.differing)
    assert f"{name}: " in str(found) and "NOT VERIFIED" in str(found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool, torch.complex64])
def test_zeros_are_no_sign_of_another_weight(dtype: torch.dtype) -> None:
    state = {"a": torch.ones(8, dtype=dtype), "b": torch.zeros(8, dtype=dtype)}
    found = fastcheck.verify({**state, "a": torch.zeros(8, dtype=dtype)}, fastcheck.receipt(state))
    assert found.differing == {"a": "all zeros"}


def test_clean_weights_are_not_accused(made: fastcheck.types.Receipt, tmp_path: Path) -> None:
    for model in (Sender(), Sender().state_dict()):
        found = fastcheck.verify(model, made)
        assert found and found.equal == 14 and str(found).endswith("verified")
    Path(tmp_path / "receipt.json").write_text(json.dumps(made.to_dict()))
    torch.save(Sender().state_dict(), tmp_path / "model.pt")
    assert fastcheck.verify(str(tmp_path / "model.pt"), str(tmp_path / "receipt.json"))
    for dtype in (torch.bfloat16, torch.float16):
        cast = Sender().to(dtype)
        assert not fastcheck.verify(cast, made)
        found = fastcheck.verify(cast, made, accept=("dtype",))
        assert found and found.equal == found.cast == 14
        assert str(found).startswith("0 weights are equal to the bit, 14 are cast")
        assert fastcheck.verify(cast, fastcheck.receipt(cast))
        assert fastcheck.verify(cast.float(), fastcheck.receipt(cast), accept=("dtype",))


def test_missing_and_unexpected(weights: Weights, made: fastcheck.types.Receipt) -> None:
    del weights[LARGE]
    weights["extra"] = torch.ones(2)
    found = fastcheck.verify(weights, made)
    assert not found and found.missing == (LARGE,) and found.unexpected == ("extra",)


def test_a_weight_that_cannot_be_read_is_not_missing(weights: Weights, made: Any) -> None:
    weights[LARGE] = weights[LARGE].to_sparse()
    found = fastcheck.verify(weights, made)
    assert not found and not found.missing and "can't be read" in found.differing[LARGE]
    weights["extra"] = weights.pop(LARGE)
    found = fastcheck.verify(weights, made)
    assert found.missing == (LARGE,) and "extra can't be read" in found.notes[0]


def test_a_tied_weight_may_come_once() -> None:
    model = nn.ModuleDict({"embedding": nn.Embedding(8, 4), "head": nn.Linear(4, 8, bias=False)})
    model["head"].weight = model["embedding"].weight
    state = {"embedding.weight": model["embedding"].weight.detach().clone()}
    assert fastcheck.verify(state, fastcheck.receipt(model))
    untied = {"embedding.weight": state["embedding.weight"], "head.weight": torch.ones(8, 4)}
    assert list(fastcheck.verify(untied, fastcheck.receipt(model)).differing) == ["head.weight"]


def fused(w: Weights) -> Weights:
    w = dict(w)
    for name, parts in {
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "gate_up_proj": ("gate_proj", "up_proj"),
    }.items():
        for kind in ("weight", "bias"):
            w[f"{name}.{kind}"] = torch.cat([w.pop(f"{part}.{kind}") for part in parts])
    return w


def test_fused_weights_by_a_map(weights: Weights, made: fastcheck.types.Receipt) -> None:
    assert fastcheck.verify(fused(weights), made, map="vllm").equal == 14
    own = {
        "qkv_proj.*": ["q_proj.*", "k_proj.*", "v_proj.*"],
        "gate_up_proj.*": ["gate_proj.*", "up_proj.*"],
    }
    assert fastcheck.verify(fused(weights), made, map=own)
    wrong = {**own, "qkv_proj.*": ["q_proj.*", "v_proj.*", "k_proj.*"]}
    found = fastcheck.verify(fused(weights), made, map=wrong)
    assert (
        "k_proj.weight of the receipt: swapped, or the map is wrong"
        in (found.differing["qkv_proj.weight"])
    )
    weights["k_proj.weight"] = OLD["k_proj.weight"]
    text = fastcheck.verify(fused(weights), made, map="vllm").differing["qkv_proj.weight"]
    assert text == "k_proj.weight in it: old: as in the receipt before"
    assert fastcheck.verify(fused(weights), made).equal < 14


def test_another_order_of_the_parts_is_said(weights: Weights, made: Any) -> None:
    """vLLM reads each part in one piece: in turns by row, or with q at the end, they are others."""
    right, own = fused(weights), {"gate_up_proj.*": ["gate_proj.*", "up_proj.*"]}
    gate_up, qkv = right["gate_up_proj.weight"], right["qkv_proj.weight"]
    in_turns = {**right, "gate_up_proj.weight": torch.stack(gate_up.chunk(2), 1).flatten(0, 1)}
    found = fastcheck.verify(in_turns, made, map="vllm")
    rows = len(gate_up) // 2
    text = f"its parts follow each other in {rows} groups, and are expected in one"
    assert found.differing == {"gate_up_proj.weight": text}
    found = fastcheck.verify(in_turns, made, map=own)
    assert "gate_up_proj.weight" not in found.differing
    assert f"gate_up_proj.weight has its parts in {rows} groups" in found.notes[0]
    q = len(weights["q_proj.weight"])
    moved = {**right, "qkv_proj.weight": torch.cat([qkv[q:], qkv[:q]])}
    assert fastcheck.verify(moved, made, map="vllm").differing == {
        "qkv_proj.weight": "its parts are in the order k_proj.weight, v_proj.weight, q_proj.weight"
    }


def test_dimensions_in_another_order() -> None:
    stacked = torch.randn(4, 8, 8)
    found = fastcheck.verify({"experts": stacked.mT}, fastcheck.receipt({"experts": stacked}))
    assert found.differing == {"experts": "transposed: dimensions 1 and 2"}
    found = fastcheck.verify({"experts": stacked.mT + 1}, fastcheck.receipt({"experts": stacked}))
    assert found.differing == {"experts": "other values"}


def test_another_prefix_of_the_names(weights: Weights, made: fastcheck.types.Receipt) -> None:
    longer = {f"module.{name}": value for name, value in weights.items()}
    found = fastcheck.verify({**longer, "extra": torch.ones(2)}, made)
    assert found.notes == ('the names begin otherwise: map={"module.*": "*"}',)
    assert fastcheck.verify(longer, made, map={"module.*": "*"})
    found = fastcheck.verify(weights, fastcheck.receipt(longer))
    assert found.notes == ('the names begin otherwise: map={"*": "module.*"}',)
    assert fastcheck.verify(weights, fastcheck.receipt(longer), map={"*": "module.*"})
    assert not fastcheck.verify({"a.b": torch.ones(2)}, made).notes


def test_what_cannot_be_used_is_refused(made: fastcheck.types.Receipt, tmp_path: Path) -> None:
    with pytest.raises(fastcheck.ConfigError, match="no weights"):
        fastcheck.receipt({})
    with pytest.raises(fastcheck.CompareError, match="not a receipt"):
        fastcheck.verify(Sender(), {"tensors": {}})
    with pytest.raises(fastcheck.CompareError, match="not a receipt"):
        fastcheck.receipt(Sender(), before={"tensors": {}})
    with pytest.raises(fastcheck.ConfigError, match="unknown map"):
        fastcheck.verify(Sender(), made, map="vlm")
    with pytest.raises(fastcheck.ConfigError, match="did you mean 'dtype'"):
        fastcheck.verify(Sender(), made, accept=("dtyp",))
    (tmp_path / "receipt.json").write_text("{")
    for name in ("receipt.json", "absent.json"):
        with pytest.raises(fastcheck.CompareError, match="the receipt can't be read") as caught:
            fastcheck.verify(Sender(), tmp_path / name)
        assert "hint:     copy the file again" in str(caught.value)


def vocabulary(rows: int) -> Weights:
    """Two weights with a row for each of 100 words, and others behind."""
    torch.manual_seed(2)
    table, head = torch.randn(2, 100, 64)
    more = torch.randn(2, rows, 64) if rows > 0 else torch.zeros(2, 0, 64)
    words = min(100, 100 + rows)
    return {
        "model.embed_tokens.weight": torch.cat([table[:words], more[0]]),
        "model.norm.weight": torch.ones(64),
        "lm_head.weight": torch.cat([head[:words], more[1]]),
    }


def test_padding_behind_the_vocabulary_is_not_verified() -> None:
    made = fastcheck.receipt(vocabulary(0))
    found = fastcheck.verify(vocabulary(28), made)
    assert found and found.equal == 3
    assert found.notes == (
        "28 rows of padding behind model.embed_tokens.weight are not verified, nor those of 1 more",
    )
    # The sender pads, and knows how many words there are.
    of_trainer = fastcheck.receipt(vocabulary(28), vocabulary=100)
    for rows in (0, 28, 12):
        assert fastcheck.verify(vocabulary(rows), of_trainer)


def test_wrong_padding_is_found() -> None:
    made = fastcheck.receipt(vocabulary(0))
    found = fastcheck.verify(vocabulary(-4), made)
    hint = "its shape is (96, 64), expected (100, 64); if the rows behind are padding: "
    assert set(found.differing) == {"model.embed_tokens.weight", "lm_head.weight"}
    assert found.differing["lm_head.weight"] == f"{hint}receipt(vocabulary=96)"
    weights = vocabulary(28)
    weights["lm_head.weight"] = weights["lm_head.weight"].roll(28, 0)
    assert set(fastcheck.verify(weights, made).differing) == {"lm_head.weight"}
    weights = vocabulary(0)
    weights["model.norm.weight"] = torch.ones(72)
    found = fastcheck.verify(weights, made)
    assert found.differing == {"model.norm.weight": "its shape is (72,), expected (64,)"}


def test_shards_of_a_vocabulary_are_no_padding() -> None:
    """The ranks pad 99 words to 100, and the last has the shard of the first."""
    weights = {"lm_head.weight": vocabulary(0)["lm_head.weight"][:99]}
    first = fastcheck.receipt({"lm_head.weight": weights["lm_head.weight"][:50]})
    for receipts in (first, [first, first]):
        found = fastcheck.verify(weights, receipts)
        assert not found and "padding" not in str(found), str(found)


@pytest.mark.parametrize(
    "change",
    [
        {"shape": ["64", 64]},
        {"parts": {"float32": 3}},
        {"shards": {"2": [{"float32": []}]}},
        {"shards": {"0": []}},
        {"shards": {"0": [3]}},
    ],
)
def test_a_damaged_receipt_is_refused(weights: Weights, change: dict[str, Any]) -> None:
    made = fastcheck.receipt(weights)
    assert fastcheck.verify(weights, made.to_dict())
    made.tensors[LARGE].update(change)
    with pytest.raises(fastcheck.CompareError, match="not a receipt"):
        fastcheck.verify(weights, made.to_dict())


@pytest.mark.parametrize(
    ("sealed", "dtype"),
    [(torch.int64, torch.int32), (torch.bool, torch.uint8), (torch.float32, torch.int16)],
)
def test_numbers_in_an_integer_dtype_are_cast(sealed: torch.dtype, dtype: torch.dtype) -> None:
    x = torch.arange(8, dtype=torch.float32).ge(3).to(sealed)
    made = fastcheck.receipt({"steps": x})
    assert "cast from" in (
        said := fastcheck.verify({"steps": x.to(dtype)}, made).differing["steps"]
    )
    assert "other values" not in said and "the bits of" not in said
    assert fastcheck.verify({"steps": x.to(dtype)}, made, accept=("dtype",)).cast == 1
    assert not fastcheck.verify({"steps": x.to(dtype) + 1}, made, accept=("dtype",))


def test_any_byte_of_a_packed_receipt_counts(weights: Weights) -> None:
    made = json.loads(json.dumps(fastcheck.receipt(weights).to_dict()))
    packed = made["packed"]
    for at in range(0, len(packed), 7):
        changed = {**made, "packed": packed[:at] + chr(ord(packed[at]) ^ 1) + packed[at + 1 :]}
        for damaged in (changed, {**made, "packed": packed[:at]}):
            with pytest.raises(fastcheck.CompareError, match="not a receipt"):
                fastcheck.verify(weights, damaged)
    for given in (3, None, [packed], "", "00000"):
        with pytest.raises(fastcheck.CompareError, match="not a receipt"):
            fastcheck.verify(weights, {**made, "packed": given})


def test_weights_are_read_in_one_call(weights: Weights, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or in a few: a cast of all is not held."""
    calls: list[int] = []

    def counted(tensors: list[torch.Tensor], logical: bool) -> torch.Tensor:
        calls.append(sum(tensor.nbytes for tensor in tensors))
        return functions.checksums(tensors, logical)

    monkeypatch.setattr(reading, "checksums", counted)
    made = fastcheck.receipt(weights)
    assert fastcheck.verify(weights, made) and len(calls) == 2
    monkeypatch.setattr(reading, "_BATCH_BYTES", 20_000)
    calls.clear()
    assert fastcheck.receipt(weights) == made and len(calls) > 5 and max(calls) < 50_000


@pytest.mark.parametrize("names", [["a.weight:", ":\x01", '":"', "0123456789abcdef", "\x01\x01"]])
def test_any_name_can_be_packed(names: list[str]) -> None:
    weights = {name: torch.randn(64, 64 + number) for number, name in enumerate(names)}
    made = fastcheck.receipt({**weights, "tied": weights[names[3]]})
    sent = json.loads(json.dumps(made.to_dict()))
    found = fastcheck.verify(weights, sent)
    assert found and found.equal == len(names), str(found)


def test_thirty_weights_are_a_kilobyte() -> None:
    shapes = {"self_attn.q_proj": 64, "self_attn.k_proj": 32, "self_attn.v_proj": 32}
    shapes.update({"self_attn.o_proj": 64, "mlp.gate_proj": 172, "mlp.up_proj": 172})
    state: Weights = {"model.embed_tokens.weight": torch.randn(256, 128)}
    for layer in range(4):
        for name, rows in shapes.items():
            state[f"model.layers.{layer}.{name}.weight"] = torch.randn(rows, 128)
        state[f"model.layers.{layer}.input_layernorm.weight"] = torch.randn(128)
    state["lm_head.weight"] = torch.randn(256, 128)
    for dtype, most in ((torch.bfloat16, 1100), (torch.float32, 2500)):
        made = fastcheck.receipt({name: value.to(dtype) for name, value in state.items()})
        assert len(made.tensors) == 30 and len(json.dumps(made.to_dict())) < most


@pytest.mark.parametrize("words", [0, -1, True, 1.5])
def test_a_number_of_words_is_a_positive_int(words: Any) -> None:
    with pytest.raises(fastcheck.ConfigError, match="vocabulary"):
        fastcheck.receipt(vocabulary(0), vocabulary=words)


ROWS = ("q_proj.", "k_proj.", "v_proj.", "gate_proj.", "up_proj.")


def shards(w: Weights, ranks: int = 2) -> list[Weights]:
    """What tensor parallel ranks hold: rows of some weights, columns of one, and all of others."""
    found: list[Weights] = [{} for _ in range(ranks)]
    for name, value in w.items():
        dim = 0 if name.startswith(ROWS) else 1 if name == "o_proj.weight" else None
        for rank, own in enumerate(found):
            own[name] = value if dim is None else value.chunk(ranks, dim)[rank].clone()
    return found


OWN = {"qkv.*": ["q_proj.*", "k_proj.*", "v_proj.*"], "gate_up.*": ["gate_proj.*", "up_proj.*"]}


def own_names(w: Weights) -> Weights:
    return {name.replace("qkv_proj", "qkv").replace("up_proj", "up"): t for name, t in w.items()}


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_holds_shards_of_a_receipt(weights: Weights, ranks: int) -> None:
    made = json.loads(json.dumps(fastcheck.receipt(weights, ranks=ranks).to_dict()))
    for rank, own in enumerate(shards(weights, ranks)):
        for arrived, map_ in ((own, None), (fused(own), "vllm"), (own_names(fused(own)), OWN)):
            found = fastcheck.verify(arrived, made, map=map_)
            assert found and found.equal == 14, str(found)
            assert found.notes == (
                f"{len(arrived) - 3} of its tensors are the shards of rank {rank} of {ranks}",
            )
        narrow = {name: value.bfloat16() for name, value in own.items()}
        assert not fastcheck.verify(narrow, made)
        assert fastcheck.verify(narrow, made, accept=("dtype",)).cast == 14
    # Shards of the dimension that another weight has whole are shapes that nothing expects.
    wrong = {**own, "norm.weight": own["norm.weight"][:32], "o_proj.weight": weights[LARGE][:, :5]}
    if ranks == 4:
        found = fastcheck.verify(wrong, made)
        assert set(found.differing) == {"norm.weight", "o_proj.weight"}
        assert "its shape is (64, 5), expected (64, 64)" in found.differing[LARGE]


def test_wrong_shards_are_named(weights: Weights) -> None:
    made = fastcheck.receipt(weights, ranks=2)
    one, other = shards(weights)
    for name in ("q_proj.weight", LARGE, "k_proj.bias"):
        found = fastcheck.verify({**other, name: one[name]}, made)
        assert found.differing == {name: "it is the shard of rank 0"}
    swapped_ = {**one, "k_proj.weight": one["v_proj.weight"]}
    found = fastcheck.verify(swapped_, made)
    assert "it is v_proj.weight of the receipt" in found.differing["k_proj.weight"]
    found = fastcheck.verify(fused(swapped_), made, map="vllm")
    assert set(found.differing) == {"qkv_proj.weight"} and found.equal == 13
    rows = {**one, LARGE: one[LARGE].roll(1, 0)}
    assert fastcheck.verify(rows, made).differing == {LARGE: "other values"}
    narrow = {**one, LARGE: one[LARGE].bfloat16()}
    assert fastcheck.verify(narrow, made).differing == {LARGE: "cast from float32 to bfloat16"}
    # Without ranks= the receipt does not tell.
    found = fastcheck.verify(one, fastcheck.receipt(weights))
    assert "its shape is (64, 32), expected (64, 64)" in found.differing[LARGE]


@pytest.mark.parametrize("map_", [None, "vllm", OWN])
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_whole_is_compared_with_receipts_of_ranks(
    weights: Weights, ranks: int, map_: Any, tmp_path: Path
) -> None:
    def received(of: list[Weights]) -> list[Any]:
        if map_ is not None:
            of = [fused(own) if map_ == "vllm" else own_names(fused(own)) for own in of]
        return [fastcheck.receipt(own) for own in of]

    held = shards(weights, ranks)
    found = fastcheck.verify(weights, received(held), map=map_)
    assert found and found.equal == ranks * (14 if map_ is None else 8), str(found)
    if ranks == 1:
        assert fastcheck.verify(weights, received(held)[0], map=map_)
    changed = [dict(own) for own in held]
    changed[-1]["k_proj.weight"] = changed[-1]["k_proj.weight"].roll(1, 0)
    changed[0][LARGE] = held[-1][LARGE] + (ranks == 1)
    found = fastcheck.verify(weights, received(changed), map=map_)
    qkv = {"vllm": "qkv_proj.weight", None: "k_proj.weight"}.get(
        map_ if map_ != OWN else "", "qkv.weight"
    )
    expected = {qkv, LARGE} if ranks == 1 else {f"{qkv} on rank 1", f"{LARGE} on rank 0"}
    assert set(found.differing) == expected, str(found)
    paths = [tmp_path / f"{rank}.json" for rank in range(ranks)]
    for path, one in zip(paths, received(held)):
        path.write_text(json.dumps(one.to_dict()))
    assert fastcheck.verify(weights, paths, map=map_)


def test_receipts_of_stages_and_of_heads(weights: Weights) -> None:
    first = {name: value for name, value in weights.items() if name.startswith(ROWS)}
    last = {name: value for name, value in weights.items() if name not in first}
    receipts = [fastcheck.receipt(stage) for stage in (first, last)]
    assert fastcheck.verify(weights, receipts).equal == 14
    del last[LARGE]
    found = fastcheck.verify(weights, [receipts[0], fastcheck.receipt(last)])
    assert found and found.unexpected == (LARGE,)
    found = fastcheck.verify(last, receipts)
    assert not found and f"{LARGE} on rank 1" in found.missing
    parts = [weights[f"{kind}_proj.weight"].view(8, -1, 64) for kind in "qkv"]
    heads = {"qkv.weight": torch.cat(parts, 1).flatten(0, 1)}
    found = fastcheck.verify(weights, fastcheck.receipt(heads), map=OWN)
    assert found and found.notes == ("qkv.weight has its parts in 8 groups",)
    rank = {"qkv.weight": heads["qkv.weight"].chunk(2)[1]}
    found = fastcheck.verify(rank, fastcheck.receipt(weights, ranks=2), map=OWN)
    assert not found.differing and "shards of rank 1 of 2" in " ".join(found.notes)


def test_a_fused_tensor_of_another_shape(weights: Weights) -> None:
    qkv = torch.cat([weights[f"{kind}_proj.weight"] for kind in "qkv"])
    for shape, is_stack in (((160, 64), True), ((5, 32, 64), True), ((64, 160), False)):
        made = fastcheck.receipt({"qkv_proj.weight": qkv.reshape(shape)})
        found = fastcheck.verify(weights, made, map="vllm")
        assert bool(found) == is_stack, str(found)
    assert found.differing == {"qkv_proj.weight": "the same elements in the shape (160, 64)"}


def test_names_of_a_map_on_both_sides(weights: Weights, made: Any) -> None:
    assert fastcheck.verify(weights, made, map="vllm").equal == 14
    assert fastcheck.verify(fused(weights), fastcheck.receipt(fused(weights)), map="vllm")


def test_a_parameter_under_zero_3_is_what_the_rank_keeps_of_it() -> None:
    model: Any = nn.Linear(4, 3, bias=False)
    model.weight.data = torch.empty(0)
    model.weight.ds_tensor, model.weight.ds_numel = torch.arange(6.0), 12
    made = fastcheck.receipt(model)
    assert made.tensors["weight"]["shape"] == [6] and fastcheck.verify(model, made)
    model.weight.ds_tensor = torch.arange(6.0) + 1
    assert fastcheck.verify(model, made).differing == {"weight": "other values"}
    found = fastcheck.verify({"weight": torch.ones(3, 4)}, made)
    assert found.differing == {"weight": "its shape is (3, 4), expected (6,)"}
