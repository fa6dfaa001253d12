"""prove(): silent on a healthy step, names a fault and its place, keeps all state."""

from __future__ import annotations

import contextlib
import copy
import json
import threading
from typing import Any, Callable
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import fastcheck
from fastcheck.proving.prove import _AUTO

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
WORDS, WIDTH = 40, 16


class Block(nn.Module):
    def __init__(self, fault: str = "") -> None:
        super().__init__()
        self.fault, self.calls = fault, 0
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        rows, tokens, _ = x.shape
        q, k, v = (
            t.view(rows, tokens, 2, -1).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1)
        )
        seen = None if self.fault == "mask" else mask
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        y = y.transpose(1, 2).reshape(rows, tokens, -1)
        if self.fault == "rows":
            y = y + 0.001 * y.mean(0, keepdim=True)
        if self.fault == "evaluation":
            y = F.dropout(y, 0.1)
        if self.fault == "state":
            self.calls += 1
            y = y * (1 + 0.01 * self.calls)
        return x + self.drop(self.out(y))


class Model(nn.Module):
    def __init__(self, fault: str = "") -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(WORDS, WIDTH), nn.Embedding(32, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block(fault)])
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.fault = fault

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        tokens = ids.shape[1]
        x = self.embed(ids) + self.place(torch.arange(tokens))
        seen = torch.ones(tokens, tokens).tril().bool() & mask[:, None, None, :].bool()
        for block in self.blocks:
            if self.fault == "recomputed":
                x = checkpoint(block, x, seen, use_reentrant=False, preserve_rng_state=False)
            else:
                x = block(x, seen)
        return self.head(x)  # type: ignore[no-any-return]  # a module's result is Any


def batch() -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    ids = torch.randint(1, WORDS, (5, 7))
    mask = torch.ones_like(ids)
    mask[1, 4:] = mask[3, 2:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    return {"ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask, "labels": labels}


def loss_of(logits: torch.Tensor, labels: torch.Tensor, **options: Any) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), **options)


def made(fault: str = "") -> tuple[Model, torch.optim.Optimizer, Callable[[Any], Any]]:
    torch.manual_seed(0)
    model = Model(fault)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if fault == "hook":
        model.head.weight.register_hook(lambda grad: 2 * grad)  # of the embedding too

    def step(given: dict[str, torch.Tensor]) -> Any:
        optimizer.zero_grad()
        if fault == "means":  # of micro-batches that have other numbers of targets
            for rows in (slice(0, 2), slice(2, 5)):
                part = {name: tensor[rows] for name, tensor in given.items()}
                logits = model(part["ids"], part["attention_mask"])
                (loss_of(logits, part["labels"]) / 2).backward()  # type: ignore[no-untyped-call]  # torch has it untyped
            optimizer.step()
            return None
        logits = model(given["ids"], given["attention_mask"])
        loss = loss_of(logits, given["labels"])
        if fault == "count":
            loss = loss_of(logits, given["labels"], reduction="sum") / given["labels"].numel()
        loss.backward()  # type: ignore[no-untyped-call]  # torch has it untyped
        optimizer.step()
        return loss

    return model, optimizer, step


def proof_of(fault: str = "", relations: Any = "auto") -> fastcheck.types.Proof:
    model, optimizer, step = made(fault)
    return fastcheck.prove(step, batch(), model=model, optimizer=optimizer, relations=relations)


def differing(proof: fastcheck.types.Proof) -> dict[str, Any]:
    return {one.relation: one.first for one in proof.outcomes if one.state == "differs"}


def test_a_healthy_step_holds() -> None:
    proof = proof_of()
    assert proof and proof.holds
    asked = [one for one in proof.outcomes if one.state != "not asked"]
    assert {one.relation: one.state for one in asked} == dict.fromkeys(
        [
            "the same again",
            "rows in another order",
            "rows do not reach each other",
            "more padding",
            "micro-batches against the whole",
            "activation checkpointing",
            "attention by its definition",
            "shared parameters as copies",
            "save, load and go on",
            "evaluation twice",
        ],
        "holds",
    )
    assert all(one.score is not None and one.score < 5 for one in asked)
    assert proof["micro-batches against the whole"].note.endswith("by targets")
    assert json.loads(json.dumps(proof.to_dict()))["holds"] is True


@pytest.mark.parametrize(
    ("fault", "relation", "module"),
    [
        ("mask", "padded", "blocks.1"),
        ("rows", "alone", "blocks.1"),
        ("evaluation", "evaluated", "blocks.1"),
        ("state", "saved", "blocks.1"),
        ("recomputed", "checkpointed", "blocks.1.drop"),
        ("hook", "unshared", "embed"),
    ],
)
def test_a_fault_is_named_with_its_module(fault: str, relation: str, module: str) -> None:
    proof = proof_of(fault, [relation])
    (place,) = differing(proof).values()
    assert not proof
    assert place.module == module
    assert str(place) in str(proof)
    if fault in ("mask", "rows", "state"):
        assert __file__ in place.line


def test_a_fault_of_the_step_is_named_as_the_loss() -> None:
    (place,) = differing(proof_of("count", ["padded"])).values()
    assert place.kind == "loss"


def test_micro_batches_are_named_as_the_step() -> None:
    (place,) = differing(proof_of("means", ["permuted"])).values()
    assert place.kind == "step" and "does not call the model once" in str(place)


def test_an_optimizer_that_forgets_is_named_as_the_update() -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    calls = 0

    def step(x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        optimizer.param_groups[0]["lr"] = 0.1 / calls
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss  # type: ignore[no-any-return]  # a module's result is Any

    proof = fastcheck.prove(
        step, torch.ones(2, 4), model=model, optimizer=optimizer, relations=["again"]
    )
    (place,) = differing(proof).values()
    assert place.kind == "update" and str(place) in str(proof)


@pytest.mark.parametrize("way", ["in place", "a generator of its own"])
def test_a_step_that_does_not_repeat_differs_from_itself(way: str) -> None:
    torch.manual_seed(0)
    own = torch.Generator()

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.a(x)
            if way != "in place":
                y = y * torch.rand(y.shape, generator=own)
            return self.b(y)  # type: ignore[no-any-return]  # a module's result is Any

    model = Net()

    def step(x: torch.Tensor) -> torch.Tensor:
        return model(x.mul_(2.0) if way == "in place" else x).square().mean()  # type: ignore[no-any-return]  # a module's result is Any

    proof = fastcheck.prove(step, torch.randn(4, 4), model=model, relations=["again"])
    (place,) = differing(proof).values()
    given = "what it is given (input[0])" if way == "in place" else "what b is given (input[0])"
    assert (place.module, place.kind, place.what) == ("", "forward", given)


def test_a_step_that_cuts_off_its_padding_holds() -> None:
    model, _, _ = made()

    def step(given: dict[str, torch.Tensor]) -> torch.Tensor:
        length = int(given["attention_mask"].sum(1).max())
        part = {name: tensor[:, :length] for name, tensor in given.items()}
        return loss_of(model(part["ids"], part["attention_mask"]), part["labels"])

    proof = fastcheck.prove(step, batch(), model=model, relations=["padded", "permuted"])
    assert [one.state for one in proof.outcomes] == ["holds", "holds"]


def test_a_parameter_that_a_load_replaces_is_put_back() -> None:
    class Untying(Model):
        def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
            self.head.weight = nn.Parameter(self.embed.weight.detach().clone())
            return super().load_state_dict(*args, **kwargs)

    torch.manual_seed(0)
    model = Untying()

    def step(given: dict[str, torch.Tensor]) -> torch.Tensor:
        return loss_of(model(given["ids"], given["attention_mask"]), given["labels"])

    proof = fastcheck.prove(step, batch(), model=model, relations=["saved"])
    assert "save, load and go on" in differing(proof)
    assert model.head.weight is model.embed.weight


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    found: list[Any] = [torch.get_rng_state()]
    found += [t.clone() for t in model.state_dict().values()]
    found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
    for state in optimizer.state.values():
        found += [value.clone() for value in state.values()]
    return found


@pytest.mark.parametrize("is_broken", [False, True])
def test_state_is_kept_bit_for_bit(is_broken: bool) -> None:
    model, optimizer, step = made()
    given = batch()
    step(given)
    copies = {name: tensor.clone() for name, tensor in given.items()}
    before = everything(model, optimizer)
    count = 0

    def counted(one: Any) -> Any:
        nonlocal count
        count += 1
        returned = step(one)
        one["ids"].zero_()
        if is_broken:
            raise KeyError("a fault of the step")
        return returned

    with pytest.raises(KeyError) if is_broken else contextlib.nullcontext():
        fastcheck.prove(counted, given, model=model, optimizer=optimizer)
    assert count == 1 if is_broken else count > 10
    after = everything(model, optimizer)
    assert len(before) == len(after) and all(map(torch.equal, before, after))
    assert all(torch.equal(given[name], copies[name]) for name in given)
    assert not model._forward_hooks and not model.embed.weight._backward_hooks


@pytest.mark.parametrize("relation", list(_AUTO))
def test_a_relation_that_raises_leaves_all_as_it_was(relation: str) -> None:
    torch.manual_seed(0)
    model, optimizer, step = made()
    given = batch()
    given.update(positions=torch.arange(7).expand(5, 7).clone(), segments=given["attention_mask"])
    step(given)
    before, layers = everything(model, optimizer), [vars(m).copy() for m in model.modules()]
    kind = _AUTO[relation]
    raised = 0

    def broken(*args: Any) -> Any:
        nonlocal raised
        raised += 1
        raise KeyError("a fault of the model")

    def run(self: Any, case: Any, base: Any, sites: bool = False) -> Any:
        # In the middle of the step: the first block has run, and its hooks.
        with mock.patch.object(model.blocks[1].out, "forward", broken):
            return original(self, case, base, sites)

    def cast(one: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return step(one)

    original = kind.run
    with mock.patch.object(kind, "run", run):
        used = cast if relation == "autocast" else step
        proof = fastcheck.prove(used, given, model=model, optimizer=optimizer, relations=[relation])
    assert raised == 1 and [one.state for one in proof.outcomes] == ["failed"]
    after = everything(model, optimizer)
    assert len(before) == len(after) and all(map(torch.equal, before, after))
    for module, were in zip(model.modules(), layers):
        assert {k: v for k, v in vars(module).items() if k not in _HOOKS} == {
            k: v for k, v in were.items() if k not in _HOOKS
        }
        assert not any(vars(module)[name] for name in _HOOKS)


def test_what_depends_on_the_batch_by_design_is_said() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    x, y = torch.randn(6, 4), torch.randint(2, (6,))
    proof = fastcheck.prove(lambda b: F.cross_entropy(model(b[0]), b[1]), (x, y), model=model)
    assert proof.holds
    for name in ("rows do not reach each other", "micro-batches against the whole"):
        assert proof[name].state == "by design"
        assert proof[name].note == "depends on the batch by design: BatchNorm1d 1"
    assert proof["rows in another order"].state == "holds"


def test_a_contrastive_loss_is_measured_to_depend_on_the_batch() -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 8)

    def step(pairs: torch.Tensor) -> torch.Tensor:
        a, b = (F.normalize(model(part)) for part in pairs.unbind(1))
        return F.cross_entropy(10 * a @ b.T, torch.arange(len(a)))

    proof = fastcheck.prove(step, torch.randn(6, 2, 8), model=model)
    assert proof.holds
    assert proof["micro-batches against the whole"].state == "by design"
    assert "which a mean of rows would be" in proof["micro-batches against the whole"].note


def test_nothing_is_said_of_a_step_whose_loss_is_nan() -> None:
    model = nn.Linear(4, 1)
    proof = fastcheck.prove(
        lambda x: model(x).mean() * float("nan"), torch.randn(4, 4), model=model
    )
    for name in ("the same again", "rows in another order", "save, load and go on"):
        assert proof[name].state == "not asked"
        assert proof[name].note == "the loss of the step is not finite"
    assert proof["rows do not reach each other"].state == "holds"  # of outputs alone


def test_a_model_that_samples_in_evaluation_is_no_fault() -> None:
    class Sampling(nn.Module):
        def __init__(self, way: str) -> None:
            super().__init__()
            self.inner, self.way = nn.Linear(4, 4), way

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.inner(x)
            if self.way == "dropout":
                return F.dropout(x, 0.5)
            return x + (torch.randn(1) if self.way == "torch" else np.random.rand())

    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()  # type: ignore[no-any-return]  # a module's result is Any

    for way, state in (("torch", "by design"), ("numpy", "by design"), ("dropout", "differs")):
        proof = fastcheck.prove(step, torch.randn(4, 4), model=Sampling(way))
        assert proof["evaluation twice"].state == state


def test_a_cache_that_grows_in_evaluation_is_a_fault() -> None:
    """The second evaluation differs, and nothing was drawn."""

    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.cache = nn.Linear(4, 4), []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.inner(x)
            if not self.training:
                self.cache.append(y.detach())
                y = y + sum(self.cache)
            return y  # type: ignore[no-any-return]  # a module's result is Any

    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()  # type: ignore[no-any-return]  # a module's result is Any

    proof = fastcheck.prove(step, torch.randn(4, 4), model=Cached())
    assert proof["evaluation twice"].state == "differs"


def test_noise_that_a_step_draws_is_no_fault() -> None:
    model = nn.Linear(4, 4)

    def step(x: torch.Tensor) -> torch.Tensor:
        return (model(x + torch.randn_like(x)) - x).square().mean()

    proof = fastcheck.prove(step, torch.randn(4, 4), model=model)
    assert proof.holds
    assert proof["rows in another order"].state == "by design"


def test_noise_of_a_generator_that_is_named_is_no_fault() -> None:
    model, generator = nn.Linear(4, 4), torch.Generator().manual_seed(3)

    def step(x: torch.Tensor) -> torch.Tensor:
        return model(x + torch.randn(x.shape, generator=generator)).square().mean()  # type: ignore[no-any-return]  # a module's result is Any

    proof = fastcheck.prove(step, torch.randn(4, 4), model=model, also=[generator])
    states = [proof[name].state for name in ("rows in another order", "save, load and go on")]
    assert proof.holds and states == ["by design"] * 2


def test_a_second_model_that_the_step_trains_is_saved_too() -> None:
    torch.manual_seed(0)
    made, judge = nn.Linear(4, 4), nn.Linear(4, 1)
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (made, judge))

    def step(x: torch.Tensor) -> torch.Tensor:
        theirs.zero_grad()
        F.softplus(judge(made(x).detach())).mean().backward()  # type: ignore[no-untyped-call]  # torch has it untyped
        theirs.step()
        ours.zero_grad()
        loss = F.softplus(-judge(made(x))).mean()
        loss.backward()  # type: ignore[no-untyped-call]  # torch has it untyped
        ours.step()
        return loss

    given = {"model": made, "optimizer": [ours, theirs], "also": [judge]}
    assert fastcheck.prove(step, torch.randn(4, 4), relations="saved", **given)  # type: ignore[arg-type]  # of one dict


def test_complex_numbers_are_compared_whole() -> None:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.turn = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.to(self.turn.dtype) @ self.turn

    def not_reduced(model: nn.Module) -> nn.Module:
        return model

    class Conjugate(fastcheck.Relation):
        name = "the conjugate gradient"

        @contextlib.contextmanager
        def changed(self, case: Any) -> Any:
            hook = model.turn.register_hook(torch.conj)
            yield
            hook.remove()

    torch.manual_seed(0)
    model = Turned()
    relations: list[Any] = [
        "permuted",
        "alone",
        "micro_batches",
        "saved",
        Conjugate(),
        fastcheck.Ranks(not_reduced),
    ]
    proof = fastcheck.prove(
        lambda model, x: model(x).abs().square().mean(),
        torch.randn(4, 4),
        model=model,
        optimizer=torch.optim.Adam(model.parameters()),
        relations=relations,
    )
    assert [one.state for one in proof.outcomes] == ["holds"] * 4 + ["differs"] * 2
    assert all(one.score is not None and one.score < 5 for one in proof.outcomes[:4])


def test_two_threads_prove_one_after_the_other() -> None:
    """And torch is as it was at the end of both."""
    began, ended = threading.Event(), threading.Event()
    was = torch.autograd._engine_run_backward  # type: ignore[attr-defined]  # torch has it for itself
    model, second = nn.Linear(4, 4), nn.Linear(4, 4)

    def step(x: torch.Tensor) -> torch.Tensor:
        if other.ident is None:
            other.start()
            began.wait(0.5)
        return model(x).square().mean()  # type: ignore[no-any-return]  # a module's result is Any

    def second_step(x: torch.Tensor) -> torch.Tensor:
        began.set()
        ended.wait(30)
        return second(x).square().mean()  # type: ignore[no-any-return]  # a module's result is Any

    given = torch.randn(4, 4)
    other = threading.Thread(
        target=fastcheck.prove, args=(second_step, given), kwargs={"model": second}
    )
    assert fastcheck.prove(step, given, model=model, relations=["again"])
    ended.set()
    other.join()
    assert torch.autograd._engine_run_backward is was  # type: ignore[attr-defined]  # torch has it for itself


def test_a_relation_of_ones_own() -> None:
    class Kernel(fastcheck.Relation):
        name = "my kernel against torch's"

        def changed(self, case: Any) -> Any:
            return mock.patch.object(F, "gelu", lambda x: x * 0.5 * (1 + torch.erf(x / 2**0.5)))

    class Worse(Kernel):
        name = "a worse one"

        def changed(self, case: Any) -> Any:
            return mock.patch.object(F, "gelu", lambda x: x * torch.sigmoid(1.702 * x))

    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 32), nn.Linear(32, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(F.gelu(self.a(x)))  # type: ignore[no-any-return]  # a module's result is Any

    model = Net()
    proof = fastcheck.prove(
        lambda x: model(x).square().mean(),
        torch.randn(16, 8),
        model=model,
        relations=[Kernel(), Worse()],
    )
    assert [one.state for one in proof.outcomes] == ["holds", "differs"]
    place = proof["a worse one"].first
    assert place is not None and "what b is given" in str(place)


def test_a_relation_that_raises_is_reported_and_the_others_are_asked() -> None:
    class Broken(fastcheck.Relation):
        name = "broken"

        def run(self, case: Any, base: Any, sites: bool = False) -> Any:
            raise ZeroDivisionError("in the relation")

    proof = proof_of(relations=[Broken(), "again"])
    assert [one.state for one in proof.outcomes] == ["failed", "holds"]
    assert proof["broken"].note == "ZeroDivisionError: in the relation"


def test_time_major_batches_are_not_permuted() -> None:
    torch.manual_seed(0)
    model = nn.GRU(4, 4)
    proof = fastcheck.prove(
        lambda x: model(x)[0].square().mean(), torch.randn(6, 3, 4), model=model
    )
    assert proof.holds
    assert proof["rows in another order"].state == "not asked"


@pytest.mark.parametrize("target", [[1, 0, 2, 1], [0, 1, 2, 3]], ids=["labels", "times"])
def test_one_number_for_each_row_says_which_dimension_is_theirs(target: list[int]) -> None:
    torch.manual_seed(0)
    model = nn.GRU(4, 4)
    batch = torch.randn(4, 3, 4), torch.tensor(target)
    proof = fastcheck.prove(
        lambda b: F.cross_entropy(model(b[0])[0][:, -1], b[1]), batch, model=model
    )
    outcome = proof["rows in another order"]
    assert outcome.state == ("differs" if target[0] else "not asked")


def test_tensors_of_pairs_of_tokens_are_not_padded() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    batch = {"x": torch.randn(2, 3, 4), "graph": torch.rand(2, 3, 3), "attention_mask": mask}
    proof = fastcheck.prove(
        lambda b: model((b["graph"] * b["attention_mask"][:, None]) @ b["x"])[:, 0].square().mean(),
        batch,
        model=model,
    )
    assert proof.holds
    assert proof["more padding"].note == "batch.graph may have an entry for every pair of tokens"


def test_a_cache_of_the_model_differs_and_does_not_raise() -> None:
    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.past = nn.Linear(4, 4), list[torch.Tensor]()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.past.append(self.inner(x).detach())
            return self.inner(x) + torch.stack(self.past).mean(0) * len(self.past)

    model = Cached()
    x = torch.randn(4, 4)
    proof = fastcheck.prove(lambda x: model(x).square().mean(), x, model=model, relations=["again"])
    assert proof["the same again"].state == "differs" and not model.past


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"model": 3}, "model"),
        ({"optimizer": [3]}, "optimizer"),
        ({"relations": ["unknown"]}, "relations"),
        ({"relations": None}, "relations"),
        ({"also": [3]}, "also"),
    ],
)
def test_what_cannot_be_used_is_refused(options: dict[str, Any], named: str) -> None:
    given: dict[str, Any] = {"model": nn.Linear(1, 1), **options}
    with pytest.raises(fastcheck.ConfigError, match=rf"prove\({named}=\)"):
        fastcheck.prove(lambda x: x, torch.ones(1), **given)


def test_a_step_that_leaves_nothing_is_refused() -> None:
    model = nn.Linear(2, 2)
    state = copy.deepcopy(model.state_dict())
    with pytest.raises(fastcheck.ConfigError, match=r"prove\(step=\)"):
        fastcheck.prove(lambda x: None, torch.ones(2, 2), model=model)
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())


def test_a_relation_may_be_named_as_the_table_does() -> None:
    model = nn.Linear(2, 2)
    proof = fastcheck.prove(
        lambda x: model(x).square().mean(),
        torch.ones(2, 2),
        model=model,
        relations=["rows in another order", "again"],
    )
    assert [one.relation for one in proof.outcomes] == ["rows in another order", "the same again"]


@pytest.mark.parametrize("given", [(3,), (nn.Identity(), 1)])
def test_ranks_of_what_is_none_are_refused(given: tuple[Any, ...]) -> None:
    with pytest.raises(fastcheck.ConfigError, match="2 ranks or more"):
        fastcheck.Ranks(*given)
