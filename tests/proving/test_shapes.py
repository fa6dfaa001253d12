"""Steps whose batches or models have another shape than one row for each example: each holds, or
the reason is said.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Callable, Optional

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fastcheck

_Made = tuple[nn.Module, Callable[[Any], Any], Any]
STEPS: dict[str, Callable[[], _Made]] = {}


def healthy(make: Callable[[], _Made]) -> Callable[[], _Made]:
    STEPS[make.__name__] = make
    return make


def masked(lengths: list[int], tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    mask = (torch.arange(tokens) < torch.tensor(lengths)[:, None]).long()
    return torch.randint(1, 20, mask.shape) * mask, mask


@healthy
def two_views_of_each_row() -> _Made:
    model = nn.Sequential(nn.Linear(10, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 8))

    def step(batch: Any) -> torch.Tensor:
        z = F.normalize(model(torch.cat([batch["first"], batch["second"]])), dim=1)
        alike = (z @ z.t() / 0.1).masked_fill(torch.eye(len(z), dtype=torch.bool), -1e9)
        return F.cross_entropy(alike, torch.arange(len(z)).roll(len(z) // 2))

    return model, step, {"first": torch.randn(5, 10), "second": torch.randn(5, 10)}


@healthy
def two_candidates_beside_each_other() -> _Made:
    model = nn.Linear(6, 1)

    def step(batch: Any) -> torch.Tensor:
        chosen = model(batch.repeat_interleave(2, 0)).view(-1, 2)
        return (chosen - batch[:, :2]).square().mean()  # type: ignore[no-any-return]  # a module's result is Any

    return model, step, torch.randn(5, 6)


class Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 16), nn.Linear(16, 20)
        self.body = nn.Transformer(16, 2, 1, 1, 32, dropout=0.0, batch_first=True)

    def forward(self, ids: Any, mask: Any, given: Any, given_mask: Any) -> Any:
        ahead = torch.ones(given.shape[1], given.shape[1], dtype=torch.bool).triu(1)
        hidden, given_hidden = mask == 0, given_mask == 0
        y = self.body(
            self.embed(ids),
            self.embed(given),
            tgt_mask=ahead,
            src_key_padding_mask=hidden,
            tgt_key_padding_mask=given_hidden,
            memory_key_padding_mask=hidden,
        )
        return self.head(y)


@healthy
def targets_as_long_as_a_cut_source() -> _Made:
    """The rows of the second half have 6 tokens, as all targets have."""
    model = Translator()
    ids, mask = masked([7, 3, 5, 6], 7)
    given, given_mask = masked([4, 6, 3, 5], 6)
    labels = given.masked_fill(given_mask == 0, -100)

    def step(batch: Any) -> torch.Tensor:
        names = ("ids", "attention_mask", "given", "given_mask")
        logits = model(*(batch[name] for name in names))
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    batch = {"ids": ids, "attention_mask": mask, "given": given, "given_mask": given_mask}
    return model, step, {**batch, "labels": labels}


class Pooled(nn.Module):
    """A vector of ``width`` numbers for each row."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed, self.wide = nn.Embedding(20, 12), nn.Linear(12, width)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = (self.embed(ids) * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return self.wide(x).tanh()  # type: ignore[no-any-return]  # a module's result is Any


def _pooled(width: int, longest: int = 9) -> _Made:
    model = Pooled(width)
    ids, mask = masked([longest, 3, 8, 5], 9)

    def step(batch: Any) -> torch.Tensor:
        y = model(batch["ids"], batch["attention_mask"])
        return (y.sum(1) - batch["labels"]).square().mean()  # type: ignore[no-any-return]  # a module's result is Any

    return model, step, {"ids": ids, "attention_mask": mask, "labels": torch.randn(4)}


@healthy
def as_wide_as_the_rows_are_long() -> _Made:
    return _pooled(9, longest=7)


@healthy
def as_wide_as_a_part_of_the_rows_is_long() -> _Made:
    return _pooled(8)


@healthy
def as_wide_as_padded_rows_are_long() -> _Made:
    return _pooled(12)


@healthy
def two_masks_of_one_shape() -> _Made:
    model = nn.Sequential(nn.Embedding(20, 16), nn.Linear(16, 20))
    chosen, chosen_mask = masked([8, 5, 6], 8)
    rejected, rejected_mask = masked([7, 8, 3], 8)

    def step(batch: Any) -> torch.Tensor:
        ids = torch.cat([batch["chosen_ids"], batch["rejected_ids"]])
        mask = torch.cat([batch["chosen_attention_mask"], batch["rejected_attention_mask"]])
        logs = model(ids)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        first, second = (logs * mask[:, 1:]).sum(1).chunk(2)
        return -F.logsigmoid(0.1 * (first - second)).mean()

    names = ("chosen_ids", "chosen_attention_mask", "rejected_ids", "rejected_attention_mask")
    return model, step, dict(zip(names, (chosen, chosen_mask, rejected, rejected_mask)))


@healthy
def layers_that_write_to_their_buffers() -> _Made:
    norm = nn.utils.parametrizations.spectral_norm
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), norm(nn.Linear(16, 16)), nn.Linear(16, 2))
    return model, lambda batch: model(batch).square().mean(), torch.randn(5, 6)


@healthy
def weights_that_are_put_in_for_a_call() -> _Made:
    model = nn.Sequential(nn.Linear(3, 12), nn.Tanh(), nn.Linear(12, 1))

    def step(batch: Any) -> torch.Tensor:
        weights = dict(model.named_parameters())
        loss = model(batch[:, 0]).square().mean()
        grads = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
        moved = {name: w - 0.1 * grad for (name, w), grad in zip(weights.items(), grads)}
        y = torch.func.functional_call(model, moved, batch[:, 1])
        return y.square().mean()  # type: ignore[no-any-return]  # a module's result is Any

    return model, step, torch.randn(4, 2, 3)


@pytest.mark.parametrize("name", STEPS)
def test_a_healthy_step_holds(name: str) -> None:
    torch.manual_seed(0)
    model, step, batch = STEPS[name]()
    proof = fastcheck.prove(step, batch, model=model)
    assert {o.state for o in proof.outcomes} <= {"holds", "not asked", "by design"}, str(proof)
    assert proof.holds
    assert sum(o.state == "holds" for o in proof.outcomes) > 4


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_the_matrix_of_a_graph_has_no_rows(scale: float) -> None:
    model = nn.Linear(8, 3)
    edges = (torch.rand(6, 6) < 0.5).float()
    edges = (edges + edges.t() + torch.eye(6)).clamp(max=1)
    batch = {"nodes": torch.randn(6, 8), "edges": edges * torch.rand(6, 1) ** scale}

    def step(batch: Any) -> torch.Tensor:
        return (batch["edges"] @ model(batch["nodes"])).square().mean()  # type: ignore[no-any-return]  # a module's result is Any

    proof = fastcheck.prove(step, batch, model=model)
    assert "edges may have an entry for every pair of rows" in proof["rows in another order"].note


def test_a_symmetric_mask_has_rows() -> None:
    model = nn.Embedding(20, 8)
    ids, mask = masked([4, 4, 3, 2], 4)
    assert torch.equal(mask, mask.t())

    def step(batch: Any) -> torch.Tensor:
        kept = model(batch["ids"]) * batch["attention_mask"][..., None]
        return kept.sum(1).square().mean()  # type: ignore[no-any-return]  # a module's result is Any

    proof = fastcheck.prove(step, {"ids": ids, "attention_mask": mask}, model=model)
    assert proof["rows in another order"].state == "holds"


SWITCHES: list[bool] = []


class Switched(nn.Sequential):
    """Has a switch for checkpointing, as models of transformers do."""

    supports_gradient_checkpointing = True

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        self.config = SimpleNamespace(use_cache=True)
        self.is_on = False

    def gradient_checkpointing_enable(self, options: Any) -> None:
        self.is_on, self.options = True, options
        self[0].register_forward_hook(lambda module, args, output: None)

    def forward(self, x: torch.Tensor, use_cache: bool = False) -> torch.Tensor:
        assert self.is_on != (self.config.use_cache or use_cache)
        SWITCHES.append(self.is_on)
        return self[2](self[1](self[0](x)))  # type: ignore[no-any-return]  # a module's result is Any


def test_a_switch_for_checkpointing_leaves_nothing_behind() -> None:
    model = Switched()
    kept = [(dict(vars(module)), len(module._forward_hooks)) for module in model.modules()]
    step = lambda batch: model(batch, use_cache=True).square().mean()  # noqa: E731  # as programs write a step
    proof = fastcheck.prove(step, torch.randn(5, 6), model=model, relations=["checkpointed"])
    assert proof.outcomes[0].note == "switched on" and SWITCHES[-1]
    assert kept == [(dict(vars(m)), len(m._forward_hooks)) for m in model.modules()]


class Cache(list[torch.Tensor]):
    """The keys that layers have appended, as a cache of transformers has them."""

    def get_seq_length(self) -> int:
        return len(self)


class Remembering(nn.Linear):
    def forward(self, x: torch.Tensor, cache: Optional[Cache] = None) -> torch.Tensor:
        keys = super().forward(x)
        if cache is None:
            return keys.tanh()
        cache.append(keys)
        return torch.cat([held for held in cache if held.shape == keys.shape]).tanh()[: len(x)]


class WithCache(nn.Module):
    """Layers that fill a cache in training: by its configuration, by an argument, or ever."""

    def __init__(self, makes: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Remembering(6, 8), Remembering(8, 4)])
        self.config, self.makes = SimpleNamespace(use_cache=makes == "setting"), makes

    def forward(self, x: torch.Tensor, use_cache: bool = False, cache: Any = None) -> torch.Tensor:
        if cache is None and (use_cache or self.config.use_cache or self.makes == "ever"):
            cache = Cache()
        for layer in self.layers:
            x = layer(x, cache)
        return x


@pytest.mark.parametrize("makes", ["setting", "argument", "ever", "given"])
def test_a_recompute_does_not_fill_a_cache_again(makes: str) -> None:
    model = WithCache(makes)

    def step(batch: torch.Tensor) -> Any:
        options: dict[str, Any] = {"argument": {"use_cache": True}, "given": {"cache": Cache()}}
        return model(batch, **options.get(makes, {})).square().mean()

    proof = fastcheck.prove(step, torch.randn(5, 6), model=model, relations=["checkpointed"])
    assert proof.outcomes[0].state == ("not asked" if makes == "given" else "holds")
    assert model.config.use_cache == (makes == "setting")


class Drifting(nn.Module):
    """Statistics of its inputs, which evaluation is to leave alone."""

    def __init__(self, is_faulty: bool) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.is_faulty = is_faulty

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean: torch.Tensor = self.mean  # type: ignore[assignment]  # a buffer, to torch a tensor or a module
        if self.training or self.is_faulty:
            mean.lerp_(x.detach().mean(0), 0.1)
        return x - mean


@pytest.mark.parametrize("is_faulty", [False, True])
def test_evaluation_that_moves_what_it_computes_with_is_named(is_faulty: bool) -> None:
    model = nn.Sequential(nn.Linear(6, 8), Drifting(is_faulty), nn.Linear(8, 1))
    step = lambda batch: model(batch).square().mean()  # noqa: E731  # as programs write a step
    outcome = fastcheck.prove(step, torch.randn(5, 6), model=model)["evaluation twice"]
    assert outcome.state == ("differs" if is_faulty else "holds")
    assert not is_faulty or (outcome.first is not None and outcome.first.module == "1")


class Graph(nn.Module):
    """The edges of a batch of graphs, each divided by the sum of its node's."""

    def __init__(self, dims: Any) -> None:
        super().__init__()
        self.dims = dims

    def forward(self, edges: torch.Tensor) -> torch.Tensor:
        return edges / (edges.sum(self.dims, keepdim=True) + 1)


def test_a_module_whose_output_needs_no_gradient_is_named() -> None:
    """And one of the parts that chunk() makes is not read."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.graph, self.mix, self.head = Graph((0, 2)), nn.Linear(5, 8), nn.Linear(4, 1)

        def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
            _, y = (self.graph(edges) @ self.mix(x)).chunk(2, -1)
            return self.head(y)  # type: ignore[no-any-return]  # a module's result is Any

    torch.manual_seed(0)
    model = Net()
    batch = {"x": torch.randn(4, 6, 5), "edges": torch.rand(4, 6, 6)}
    step = lambda batch: model(**batch).square().mean()  # noqa: E731  # as programs write a step
    proof = fastcheck.prove(step, batch, model=model, relations=["alone", "micro_batches"])
    assert [o.first.module for o in proof.outcomes if o.first is not None] == ["graph"] * 2


@pytest.mark.parametrize("is_right", [True, False])
def test_a_tensor_as_wide_as_the_rows_are_long_is_compared_with_more_padding(
    is_right: bool,
) -> None:
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(20, 8), nn.Linear(8, 1)

        def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> Any:
            count = mask.sum(1, keepdim=True) if is_right else mask.shape[1]
            return self.head((self.embed(ids) * mask[..., None]).sum(1) / count)

    torch.manual_seed(0)
    ids, mask = masked([8, 5, 7, 3], 8)
    model = Pooled()
    (outcome,) = fastcheck.prove(
        lambda batch: model(batch["ids"], batch["attention_mask"]).square().mean(),
        {"ids": ids, "attention_mask": mask},
        model=model,
        relations=["padded"],
    ).outcomes
    assert outcome.state == ("holds" if is_right else "differs")
    assert is_right or "what head is given (input[0])" in str(outcome.first)


def test_attention_that_is_causal_by_a_positional_argument_stays_so() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(20, 8), nn.Linear(8, 20)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.embed(ids)
            attended: torch.Tensor = F.scaled_dot_product_attention(x, x, x, None, 0.1, True)
            logits: torch.Tensor = self.head(x + attended)
            return logits

    torch.manual_seed(0)
    model = Attention()
    proof = fastcheck.prove(
        lambda ids: F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()),
        torch.randint(20, (4, 6)),
        model=model,
        relations=["causal", "permuted"],
    )
    assert [outcome.state for outcome in proof.outcomes] == ["holds", "holds"]


def test_an_evaluation_that_rounds_otherwise_the_second_time_holds() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.counts = nn.Linear(6, 4), [0]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.layer(x)
            self.counts[0] += not self.training
            return y * (1 + self.counts[0] * torch.finfo(torch.float32).eps)

    torch.manual_seed(0)
    model = Counting()
    (outcome,) = fastcheck.prove(
        lambda x: model(x).square().mean(), torch.randn(5, 6), model=model, relations=["evaluated"]
    ).outcomes
    assert outcome.state == "holds" and 0 < (outcome.score or 0) < 2


def test_tokens_that_the_mask_is_not_of_may_be_causal() -> None:
    torch.manual_seed(0)
    ids = torch.randint(1, 20, (4, 6))
    source, mask = masked([4, 8, 3, 5], 8)
    model = nn.Sequential(nn.Embedding(20, 6), nn.Linear(6, 20))
    (outcome,) = fastcheck.prove(
        lambda batch: F.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["ids"].flatten()),
        {"ids": ids, "source": source, "attention_mask": mask},
        model=model,
        relations=["causal"],
    ).outcomes
    assert outcome.state == "holds", outcome.note
