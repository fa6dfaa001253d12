"""Real transformers, of torch and of Hugging Face: no event with masks, a stop for each fault."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import fastcheck
from support.programs.training import stopped, where

transformers = pytest.importorskip("transformers", reason="transformers is not installed")


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=61,
        n_positions=16,
        n_embd=16,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    model: nn.Module = transformers.GPT2LMHeadModel(config)
    return model


def bert() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=61,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
    )
    model: nn.Module = transformers.BertForMaskedLM(config)
    return model


def t5() -> nn.Module:
    """Takes the logarithm of a relative position of 0, and removes what it makes of it."""
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=61,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=2,
        num_heads=2,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=8,
        decoder_start_token_id=0,
    )
    model: nn.Module = transformers.T5ForConditionalGeneration(config)
    return model


def train(model: nn.Module, steps: int) -> list[float]:
    """Padded batches, dropout on; the ModelOutput carries the loss."""
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(steps):
        tokens = torch.randint(0, 61, (3, 12))
        mask = torch.ones_like(tokens)
        mask[0, 7:] = 0
        optimizer.zero_grad()
        output: Any = model(input_ids=tokens, attention_mask=mask, labels=tokens)
        output.loss.backward()
        optimizer.step()
        losses.append(output.loss.item())
    return losses


@pytest.mark.usefixtures("op_observer")
@pytest.mark.parametrize(
    ("make", "level"), [(gpt2, "module"), (bert, "module"), (t5, "module"), (t5, "op")]
)
def test_hugging_face_is_healthy_and_bit_identical(make: Any, level: str) -> None:
    plain = make()
    watched = copy.deepcopy(plain)
    steps = 10 if level == "module" else 4
    with fastcheck.install(watched, level=level) as monitor:
        losses = train(watched, steps)
    assert losses == train(plain, steps)
    assert all(map(torch.equal, watched.state_dict().values(), plain.state_dict().values()))
    assert monitor.event_count == 0
    roles = {monitor.sites[n].role for n in monitor.records()["site"]}
    of_modules = {"input", "output", "grad_output", "param", "param_grad"}
    assert roles >= (of_modules if level == "module" else {"output", "grad_input", "param"})
    if level == "op":
        verdicts = {event.verdict.name for event in monitor.events}
        assert verdicts == {"ABSORBED"}  # aten.log of 0, in each step


@pytest.mark.parametrize(
    ("make", "path"),
    [
        (gpt2, "transformer.h.1.mlp.c_proj"),
        (bert, "bert.encoder.layer.1.output.dense"),
    ],
)
def test_hugging_face_is_stopped_and_named(make: Any, path: str) -> None:
    model = make()
    monitor = fastcheck.install(model)
    train(model, 2)
    assert monitor.event_count == 0
    module = model.get_submodule(path)
    with torch.no_grad():
        module.weight[0, 0] = float("nan")
    error = stopped(train, model, 1)
    assert where(error.culprit) == (path, "param", "weight", "arrived")
    assert error.step == 2


def test_torch_transformer_with_causal_masks() -> None:
    torch.manual_seed(0)
    model = nn.Transformer(
        d_model=16,
        nhead=2,
        num_encoder_layers=1,
        num_decoder_layers=2,
        dim_feedforward=32,
        batch_first=True,
    )
    plain = copy.deepcopy(model)
    monitor = fastcheck.install(model)
    causal = nn.Transformer.generate_square_subsequent_mask(6)
    assert causal.isneginf().any()

    def run(model: nn.Module, steps: int) -> list[float]:
        torch.manual_seed(1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        losses = []
        for _ in range(steps):
            optimizer.zero_grad()
            loss = model(torch.randn(2, 6, 16), torch.randn(2, 6, 16), tgt_mask=causal).square()
            loss.mean().backward()
            optimizer.step()
            losses.append(loss.mean().item())
        return losses

    assert run(model, 5) == run(plain, 5)
    assert monitor.event_count == 0
    with torch.no_grad():
        model.decoder.layers[1].norm2.bias[3] = float("inf")
    error = stopped(run, model, 1)
    assert where(error.culprit) == ("decoder.layers.1.norm2", "param", "bias", "arrived")
