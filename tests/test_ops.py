"""level="op": the culprit is an op, with its module and its line, and what is no culprit is said to
be none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fastcheck
from fastcheck import Verdict
from training import Apply, Net, batches, stopped

INF = float("inf")


@pytest.fixture(autouse=True)
def _fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    yield
    observer = fastcheck._C.op_observer()
    observer.stop(observer.run())


class Attention(nn.Module):
    """One head with a mask of the kind that is asked for."""

    def __init__(self, width: int = 8, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width, dtype=dtype) for _ in range(3))
        self.mask: Callable[[torch.Tensor], torch.Tensor] = causal

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.q(x) @ self.k(x).transpose(-1, -2) / math.sqrt(x.shape[-1])
        return torch.softmax(self.mask(scores), -1) @ self.v(x)


def causal(scores: torch.Tensor) -> torch.Tensor:
    n = scores.shape[-1]
    return scores.masked_fill(torch.ones(n, n).triu(1).bool(), -INF)


def train(
    model: nn.Module,
    steps: int,
    before: Callable[[int], None] = lambda step: None,
    loss: Callable[[torch.Tensor], torch.Tensor] = lambda y: y.float().square().mean(),
    shape: tuple[int, ...] = (4, 8),
    dtype: torch.dtype = torch.float32,
    optimizer: Any = None,
) -> list[float]:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for step, x in enumerate(batches(steps, *shape)):
        before(step)
        optimizer.zero_grad()
        value = loss(model(x.to(dtype)))
        value.backward()
        optimizer.step()
        losses.append(float(value.detach()))
    return losses


def culprit(stop: fastcheck.OverflowDetected) -> tuple[str, str, str, str]:
    """Module, op, direction and verdict."""
    event = stop.culprit
    return event.site.module, event.site.op or "", event.site.direction, event.verdict.name.lower()


def verdicts(monitor: fastcheck.Monitor) -> set[str]:
    return {event.verdict.name.lower() for event in monitor.events}


def model_with(function: Callable[[torch.Tensor], torch.Tensor]) -> nn.Sequential:
    """Linear, the function in a module of its own, linear."""
    model = nn.Sequential(nn.Linear(8, 8), Apply(), nn.Linear(8, 4))
    model[1].function = function
    return model


# Masks: healthy models have no events


def two_masks_summed(scores: torch.Tensor) -> torch.Tensor:
    low = torch.finfo(scores.dtype).min
    n = scores.shape[-1]
    mask = torch.zeros(n, n, dtype=scores.dtype).masked_fill(torch.ones(n, n).triu(1).bool(), low)
    return scores + mask + mask


def where_mask(scores: torch.Tensor) -> torch.Tensor:
    keep = torch.ones(scores.shape[-1], scores.shape[-1]).tril().bool()
    return torch.where(keep, scores, torch.tensor(-INF, dtype=scores.dtype))


def added_mask(scores: torch.Tensor) -> torch.Tensor:
    n = scores.shape[-1]
    return scores + torch.full((n, n), -INF, dtype=scores.dtype).triu(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("mask", [causal, two_masks_summed, where_mask, added_mask])
def test_a_mask_is_no_event(mask: Any, dtype: torch.dtype) -> None:
    model = Attention(dtype=dtype)
    model.mask = mask
    monitor = fastcheck.install(model, level="op", record="stats")
    train(model, 3, shape=(2, 6, 8), dtype=dtype)
    assert monitor.event_count == 0
    assert verdicts(monitor) <= {"intended", "absorbed"}
    assert verdicts(monitor)  # the infinities were seen, and told apart


def test_a_stored_mask_is_no_event() -> None:
    model = Attention()
    model.register_buffer("stored", torch.full((6, 6), -INF).triu(1))
    model.mask = lambda scores: scores + model.stored
    monitor = fastcheck.install(model, level="op", record="stats")
    train(model, 2, shape=(2, 6, 8))
    assert monitor.event_count == 0


def test_scaled_dot_product_attention_is_no_event() -> None:
    class Sdpa(Attention):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x), is_causal=True)

    model = Sdpa()
    monitor = fastcheck.install(model, level="op", record="stats")
    train(model, 3, shape=(2, 6, 8))
    assert monitor.event_count == 0


def test_a_nan_five_steps_after_a_healthy_mask_is_named() -> None:
    model = Attention()
    tail = model_with(lambda x: x)
    whole = nn.Sequential(model, tail)
    fastcheck.install(whole, level="op", record="stats")

    def before(step: int) -> None:
        if step == 5:
            tail[1].function = lambda x: (x * 0) / (x * 0)

    stop = stopped(train, whole, 10, before, shape=(2, 6, 8))
    assert culprit(stop) == ("1.1", "aten.div.Tensor", "forward", "origin")
    assert stop.step == 5


def test_a_row_that_is_masked_entirely() -> None:
    model = Attention()
    model.mask = lambda scores: scores.masked_fill(torch.ones_like(scores).bool(), -INF)
    fastcheck.install(model, level="op", record="stats")
    stop = stopped(train, model, 1, shape=(2, 6, 8))
    assert culprit(stop) == ("", "aten._softmax", "forward", "origin")
    assert "masked entirely" in stop.culprit.reason


# Origins

ORIGINS: list[tuple[str, Callable[[torch.Tensor], torch.Tensor], str]] = [
    ("0/0", lambda x: (x * 0) / (x * 0), "aten.div.Tensor"),
    ("log(0)", lambda x: x + torch.log(x * 0), "aten.log"),
    ("sqrt(-1)", lambda x: torch.sqrt(-x.abs() - 1), "aten.sqrt"),
    ("exp", lambda x: torch.exp(x.abs() * 1e4), "aten.exp"),
    ("inf-inf", lambda x: torch.exp(x.abs() * 1e4) - torch.exp(x.abs() * 1e4), "aten.exp"),
    ("layer norm of a constant", lambda x: F.layer_norm(x * 0, (8,), eps=0), ""),
    ("pow", lambda x: (-x.abs() - 1) ** 0.5, "aten.pow.Tensor_Scalar"),
]


@pytest.mark.parametrize(
    ("function", "op"), [row[1:] for row in ORIGINS], ids=[r[0] for r in ORIGINS]
)
def test_the_op_is_named(function: Any, op: str) -> None:
    model = model_with(function)
    fastcheck.install(model, level="op", record="stats")
    stop = stopped(train, model, 1)
    module, name, direction, verdict = culprit(stop)
    assert (module, direction, verdict) == ("1", "forward", "origin")
    assert name == op or (not op and "norm" in name)
    assert "test_ops.py" in stop.culprit.line or "training.py" in stop.culprit.line
    assert name in str(stop)


def test_an_exponential_that_overflows_in_float16() -> None:
    model = model_with(lambda x: torch.exp(x.abs().half() * 100 + 20).float())
    fastcheck.install(model, level="op", record="stats")
    stop = stopped(train, model, 1)
    assert culprit(stop)[:2] == ("1", "aten.exp")
    assert stop.culprit.record["posinf_count"] > 0


def test_a_float16_matmul_that_overflows() -> None:
    model = model_with(
        lambda x: (x.abs().half() + 2).matmul(torch.full((8, 8), -60000.0).half()).float()
    )
    fastcheck.install(model, level="op", record="stats")
    stop = stopped(train, model, 1)
    assert culprit(stop)[:2] == ("1", "aten.mm")


def test_a_sigmoid_made_of_exp_absorbs_its_infinity() -> None:
    model = model_with(lambda x: 1 / (1 + torch.exp((x.abs() + 1) * 1e4)))
    monitor = fastcheck.install(model, level="op", record="stats", overflow_nums=-1)
    with torch.no_grad():
        for x in batches(3):
            model(x)
    monitor.remove()
    assert monitor.event_count == 0
    assert "absorbed" in verdicts(monitor)


def test_where_hides_the_bad_branch_in_forward_but_not_in_backward() -> None:
    model = model_with(lambda x: torch.where(x > 1e9, torch.sqrt(x * 0), x))
    fastcheck.install(model, level="op", record="stats")
    stop = stopped(train, model, 1)
    module, op, direction, verdict = culprit(stop)
    assert (module, op, direction, verdict) == ("1", "aten.sqrt", "backward", "origin")
    assert "SqrtBackward0" in stop.culprit.reason or "div" in stop.culprit.site.label


def test_an_embedding_with_nan_weights() -> None:
    model = nn.Sequential(nn.Embedding(4, 8), nn.Linear(8, 2))
    with torch.no_grad():
        model[0].weight[2] = float("nan")
    fastcheck.install(model, level="op", record="stats")
    with pytest.raises(fastcheck.OverflowDetected) as caught:
        model(torch.tensor([0, 2]))
    event = caught.value.culprit
    assert (event.site.module, event.site.label, event.verdict) == ("0", "weight", Verdict.ARRIVED)


def test_a_poke_between_steps_is_named_where_it_was() -> None:
    model = Net()
    monitor = fastcheck.install(model, level="op", record="stats", overflow_nums=-1)
    train(model, 2)
    with torch.no_grad():
        next(model.parameters()).view(-1)[3] = float("nan")
    train(model, 1)
    began = [e for e in monitor.events if e.verdict in (Verdict.ORIGIN, Verdict.ARRIVED)]
    assert "test_ops.py" in began[0].line
    assert began[0].site.module_type == "outside the model"


def test_a_poke_through_data_is_seen() -> None:
    model = Net()
    monitor = fastcheck.install(model, level="op", record="stats", overflow_nums=-1)
    train(model, 2)
    next(model.parameters()).data.fill_(float("nan"))
    train(model, 1)
    first = monitor.events[0]
    assert (first.site.op, first.verdict) == ("aten.fill_.Scalar", Verdict.ORIGIN)
    # The parameter itself, which counts its versions apart, is known to hold what was written.
    assert not any("from outside of torch" in event.reason for event in monitor.events)


def test_a_poke_through_numpy_arrives() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    monitor = fastcheck.install(model, level="op", record="stats", overflow_nums=-1)
    x = torch.ones(2, 8)
    with torch.no_grad():
        model(x)
    y = torch.from_numpy(x.numpy().copy())
    y.numpy()[0, 0] = float("nan")
    with torch.no_grad():
        model(y)
    first = monitor.events[0]
    assert (first.site.role, first.verdict) == ("input", Verdict.ARRIVED)


def test_an_optimizer_whose_second_moment_overflows() -> None:
    model = nn.Linear(8, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, foreach=False)
    fastcheck.install(model, level="op", record="stats")
    stop = stopped(train, model, 2, loss=lambda y: y.sum() * 1e25, optimizer=optimizer)
    assert culprit(stop)[1:3] == ("aten.addcmul_", "optimizer")


def test_uninitialised_memory_is_no_event() -> None:
    def scratch(x: torch.Tensor) -> torch.Tensor:
        memory = torch.empty(x.shape)
        memory.view(-1).t()
        torch.zeros_like(memory)
        memory[:2] = 1
        return x + memory[:2].sum() + memory.fill_(2).sum()

    model = model_with(scratch)
    monitor = fastcheck.install(model, level="op", record="stats")
    torch.use_deterministic_algorithms(True)  # which fills what is uninitialised with NaN
    try:
        train(model, 3)
    finally:
        torch.use_deterministic_algorithms(False)
    assert monitor.event_count == 0


def test_uninitialised_memory_that_is_used_arrives() -> None:
    model = model_with(lambda x: x + torch.empty(8))
    fastcheck.install(model, level="op", record="stats")
    torch.use_deterministic_algorithms(True)
    try:
        stop = stopped(train, model, 1)
    finally:
        torch.use_deterministic_algorithms(False)
    assert culprit(stop) == ("1", "aten.add.Tensor", "forward", "arrived")


def test_a_custom_loss_outside_the_model_is_blamed() -> None:
    model = Net()
    fastcheck.install(model, level="op", record="stats")
    stop = stopped(train, model, 1, loss=lambda y: torch.log(y.sum() * 0))
    event = stop.culprit
    assert (event.site.op, event.site.module_type) == ("aten.log", "outside the model")
    assert "of aten.log #0 in outside the model" in str(stop)


def test_two_origins_in_one_step() -> None:
    model = nn.Sequential(*(model_with(lambda x: x) for _ in range(1)))
    monitor = fastcheck.install(model, level="op", record="stats", overflow_nums=-1)

    def both(x: torch.Tensor) -> torch.Tensor:
        a = torch.sqrt(-x.abs() - 1)
        b = torch.log(-x.abs() - 1)
        return x + torch.nan_to_num(a) + torch.nan_to_num(b)

    model[0][1].function = both
    with torch.no_grad():
        model(torch.ones(2, 8))
    origins = [e.site.op for e in monitor.events if e.verdict is Verdict.ORIGIN]
    assert origins == ["aten.sqrt", "aten.log"]


def test_only_the_backward_is_bad() -> None:
    class Bad(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient / 0 * 0

    model = model_with(Bad.apply)
    fastcheck.install(model, level="op", record="stats")
    stop = stopped(train, model, 1)
    assert stop.culprit.site.direction == "backward"
    assert "aten.div" in stop.culprit.site.label or "aten.div" in str(stop.culprit.site.op)
    assert "BadBackward" in stop.culprit.reason


# The run itself


@pytest.mark.parametrize("record", ["health", "full"])
def test_training_is_bit_identical(record: str) -> None:
    def run(observed: bool) -> tuple[list[float], list[torch.Tensor]]:
        torch.manual_seed(0)
        model = Net(dropout=0.2)
        monitor = fastcheck.install(model, level="op", record=record) if observed else None
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        losses = train(model, 4, optimizer=optimizer)
        if monitor is not None:
            monitor.remove()
        return losses, [p.detach().clone() for p in model.parameters()]

    plain, observed = run(False), run(True)
    assert plain[0] == observed[0]
    assert all(torch.equal(a, b) for a, b in zip(plain[1], observed[1]))


def test_one_monitor_at_a_time() -> None:
    first = fastcheck.install(Net(), level="op")
    with pytest.raises(fastcheck.ConfigError, match="one at a time"):
        fastcheck.install(Net(), level="op")
    first.remove()
    fastcheck.install(Net(), level="op").remove()


def test_a_module_level_monitor_beside_it() -> None:
    model = model_with(lambda x: x)
    ops = fastcheck.install(model, level="op", overflow_nums=-1)
    modules = fastcheck.install(model, overflow_nums=-1)
    train(model, 2)
    model[1].function = lambda x: torch.sqrt(-x.abs() - 1)
    train(model, 1)
    assert [e.site.op for e in ops.events if e.counted][:1] == ["aten.sqrt"]
    assert [e.site.module for e in modules.events if e.counted][:1] == ["1"]


def test_gradients_under_loss_scaling_wait_for_the_scaler() -> None:
    model = model_with(lambda x: x)
    monitor = fastcheck.install(model, level="op", record="stats")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    for x in batches(4):
        optimizer.zero_grad()
        scaler.scale(model(x).square().sum() * 1e3).backward()
        scaler.step(optimizer)
        scaler.update()
    assert monitor.event_count == 0
    assert "scaled" in verdicts(monitor)


def test_every_skips_steps() -> None:
    model = Net()
    monitor = fastcheck.install(model, level="op", every=2)
    train(model, 4)
    assert set(monitor.records()["step"]) == {0, 2}


def test_a_record_for_each_op() -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.ReLU())
    monitor = fastcheck.install(model, level="op")
    with torch.no_grad():
        y = model(torch.ones(2, 8))
    records = monitor.records()
    spelt = [(monitor.sites[int(r["site"])].op, int(r["call"])) for r in records]
    assert ("aten.addmm", 0) in spelt and ("aten.relu", 0) in spelt
    relu = next(r for r, s in zip(records, spelt) if s[0] == "aten.relu")
    assert int(relu["checksum"]) == fastcheck.stats(y).checksum


def test_checkpointed_backward_counts_once() -> None:
    from torch.utils.checkpoint import checkpoint

    inner = model_with(lambda x: torch.sqrt(-x.abs() - 1))

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = checkpoint(self.inner, x, use_reentrant=False)
            return out

    model = Outer()
    monitor = fastcheck.install(model, level="op", overflow_nums=-1)
    train(model, 1)
    assert [e.site.op for e in monitor.events if e.counted] == ["aten.sqrt"]


# Healthy models have no events


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.1)
        )
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.body(x.view(-1, 1, 8, 8)).flatten(2).logsumexp(-1))
        return y


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTM(8, 8, num_layers=2, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.cell(x.view(-1, 8, 8))[0][:, -1])
        return y


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(8)
        padding = torch.zeros(x.shape[0], 8).masked_fill(torch.arange(8) > 5, -INF)
        y: torch.Tensor = self.layer(x.view(-1, 8, 8), src_mask=mask, src_key_padding_mask=padding)
        return torch.as_tensor(self.head(y[:, 0]))


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(16, 8, padding_idx=0), nn.LayerNorm(8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = (x.view(-1, 64) > 0).long() * 7
        y: torch.Tensor = self.head(F.gelu(self.norm(self.table(tokens).mean(1))))
        return y


@pytest.mark.parametrize("mode", ["float32", "bfloat16 autocast", "float16 and GradScaler"])
@pytest.mark.parametrize("kind", [Convolutional, Recurrent, Encoder, Tokens])
def test_a_healthy_model_has_no_event(kind: type[nn.Module], mode: str) -> None:
    if kind is Recurrent and "float16" in mode and "bfloat16" not in mode:
        pytest.skip("torch has no float16 LSTM on this CPU")
    model = kind()
    monitor = fastcheck.install(model, level="op", record="stats")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", enabled="GradScaler" in mode)
    dtype = torch.float16 if "GradScaler" in mode else torch.bfloat16
    for x in batches(5, 4, 64):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype, enabled=mode != "float32"):
            loss = F.cross_entropy(model(x).float(), torch.zeros(4, dtype=torch.long))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    monitor.remove()
    counted = [e for e in monitor.events if e.counted]
    assert not counted, [(str(e.site), e.reason) for e in counted]


# Beside other machinery


def test_inference_mode() -> None:
    model = model_with(lambda x: x)
    monitor = fastcheck.install(model, level="op", overflow_nums=-1)
    with torch.inference_mode():
        for step in range(4):
            model[1].function = torch.sqrt if step == 2 else torch.relu_
            model(-torch.ones(2, 8) * 5)
    assert {e.site.op for e in monitor.events if e.counted} <= {"aten.sqrt"}
    assert "aten.relu_" in {monitor.sites[int(r["site"])].op for r in monitor.records()}


def test_functorch() -> None:
    model = nn.Linear(8, 4)
    monitor = fastcheck.install(model, level="op", overflow_nums=-1)
    out = torch.vmap(lambda x: torch.sqrt(model(x)))(-torch.ones(3, 8) * 1e3)
    assert out.shape == (3, 4)
    if bool(out.isnan().any()):
        assert monitor.event_count == 0 or "aten.sqrt" in str(monitor.events[0].site.op)


def test_a_dispatch_mode_beside_it() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    model = model_with(lambda x: torch.sqrt(-x.abs() - 1))
    monitor = fastcheck.install(model, level="op", overflow_nums=-1)
    with Mode(), torch.no_grad():
        model(torch.ones(2, 8))
    monitor.flush()
    assert "aten.sqrt.default" in seen
    assert [e.site.op for e in monitor.events if e.counted] == ["aten.sqrt"]


def test_threads() -> None:
    """Each thread's ops are named by the module that the thread is in."""
    import threading

    model = nn.ModuleDict({f"m{i}": model_with(lambda x: x) for i in range(4)})
    monitor = fastcheck.install(model, level="op", overflow_nums=-1, record="health")
    model["m2"][1].function = lambda x: torch.sqrt(-x.abs() - 1)

    def work(name: str) -> None:
        for _ in range(20):
            with torch.no_grad():
                model[name](torch.ones(2, 8))

    threads = [threading.Thread(target=work, args=(name,)) for name in model]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    monitor.flush()
    counted = {(e.site.module, e.site.op) for e in monitor.events if e.counted}
    assert counted == {("m2.1", "aten.sqrt")}
    records = monitor.records()
    of_linear = [r for r in records if monitor.sites[int(r["site"])].op == "aten.addmm"]
    assert len(of_linear) == 4 * 20 * 2


def test_an_exception_in_the_middle() -> None:
    def fail(x: torch.Tensor) -> torch.Tensor:
        raise KeyError("mine")

    model = model_with(fail)
    monitor = fastcheck.install(model, level="op", overflow_nums=-1)
    for _ in range(3):
        with pytest.raises(KeyError):
            model(torch.ones(2, 8))
    model[1].function = lambda x: torch.sqrt(-x.abs() - 1)
    model(torch.ones(2, 8))
    counted = [(e.site.module, e.site.op) for e in monitor.events if e.counted]
    assert counted == [("1", "aten.sqrt")]


def test_a_model_that_is_gone_takes_its_observer_along() -> None:
    import gc

    fastcheck.install(Net(), level="op")
    gc.collect()
    assert fastcheck._C.op_observer().run() == 0
    fastcheck.install(Net(), level="op").remove()


def test_memory_is_free_to_go() -> None:
    """Neither tensors nor their storages are kept."""
    import weakref

    model = nn.Linear(8, 8)
    monitor = fastcheck.install(model, level="op")
    kept = []
    for x in batches(3):
        y = model(x)
        kept.append(weakref.ref(y))
        del y
    assert all(one() is None for one in kept)
    monitor.remove()


# What is kept


def test_a_served_model_keeps_a_bounded_number_of_records() -> None:
    model = nn.Sequential(nn.Linear(1, 1), *(nn.ReLU() for _ in range(100)))
    monitor = fastcheck.install(model, level="op", record="health", overflow_nums=-1)
    with torch.no_grad():
        for _ in range(800):
            model(torch.ones(1))
    assert 60000 < len(monitor.records()) < 70000


def test_the_log_tells_the_op_and_the_line(tmp_path: Path) -> None:
    from fastcheck._logread import read_log

    model = model_with(lambda x: torch.sqrt(-x.abs() - 1))
    fastcheck.install(model, level="op", log_dir=tmp_path / "log")
    stopped(train, model, 1)
    event = next(e for e in read_log(tmp_path / "log").events if e.counted)
    assert event.site.op == "aten.sqrt" and "test_ops.py" in event.line


def test_a_benign_op_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    from fastcheck import _op_rules

    monkeypatch.setattr(_op_rules, "_RULES", list(_op_rules._RULES))
    fastcheck.benign("aten.sq?t", reason="squares of complex numbers are taken elsewhere")
    model = model_with(lambda x: torch.sqrt(-x.abs() - 1).nan_to_num())
    monitor = fastcheck.install(model, level="op")
    with torch.no_grad():
        model(torch.ones(2, 8))
    assert monitor.event_count == 0
    assert {(e.verdict.name, e.reason) for e in monitor.events} == {
        ("BENIGN", "squares of complex numbers are taken elsewhere")
    }


def test_options_that_do_not_go_with_it() -> None:
    with pytest.raises(fastcheck.ConfigError, match="include= and exclude="):
        fastcheck.install(Net(), level="op", include="head")
    with pytest.raises(fastcheck.ConfigError, match="reads the CPU only"):
        fastcheck.install(nn.Linear(2, 2, device="meta"), level="op")


def test_an_infinity_written_as_a_number_is_intended_whatever_becomes_of_it() -> None:
    model = model_with(lambda x: (torch.full((3,), -INF), x.masked_fill(x > 9, INF), x)[2])
    monitor = fastcheck.install(model, level="op", record="health")
    train(model, 2)
    monitor.remove()
    assert monitor.event_count == 0
    assert verdicts(monitor) == {"intended"}


def test_the_infinity_that_a_nan_was_made_of_says_so() -> None:
    model = model_with(lambda x: torch.exp(x.abs() * 1e4) - torch.exp(x.abs() * 1e4))
    fastcheck.install(model, level="op", record="stats")
    with pytest.raises(fastcheck.OverflowDetected) as caught:
        model(torch.ones(2, 8))  # by the time the module returns
    assert "aten.sub.Tensor made a NaN of it" in caught.value.culprit.reason


class _RunsInWorker(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        torch.ones(3).sum()
        return int(fastcheck._C.op_observer().run())


def test_a_forked_worker_is_not_observed() -> None:
    monitor = fastcheck.install(Net(), level="op")
    loader = torch.utils.data.DataLoader(
        _RunsInWorker(), num_workers=1, multiprocessing_context="fork"
    )
    assert [int(x) for x in loader] == [0, 0]
    assert fastcheck._C.op_observer().run() != 0
    monitor.remove()


def test_what_attention_keeps_for_its_backward_is_benign() -> None:
    class Masked(Attention):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mask = torch.full((6, 6), -INF).triu(1)
            mask[0] = -INF  # torch's own kernel gives zeros there
            q, k, v = (one(x).unsqueeze(1) for one in (self.q, self.k, self.v))
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    model = Masked()
    monitor = fastcheck.install(model, level="op", record="stats", overflow_nums=-1)
    with torch.no_grad():
        model(torch.ones(2, 6, 8))
    monitor.remove()
    of_attention = [e for e in monitor.events if "scaled_dot_product" in (e.site.op or "")]
    assert all(e.verdict is Verdict.BENIGN for e in of_attention if e.site.index == 1)
    assert monitor.event_count == 0
