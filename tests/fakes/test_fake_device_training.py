"""Training on the fake accelerator: bit-identical to the CPU, without waits, and compiled."""

from __future__ import annotations

import copy
from typing import Any, Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fakes import fake_device

fake: Any = fake_device.load()
NAME = fake.name()

pytestmark = [pytest.mark.fake_accelerator, pytest.mark.usefixtures("fake_accelerator")]


class Net(nn.Module):
    """An embedding, two linear layers, layer norm, an activation, dropout, a gate by softmax."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.embedding = nn.Embedding(17, 16)
        self.up = nn.Linear(16, 32)
        self.norm = nn.LayerNorm(32)
        self.activation = activation
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(32, 17)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.dropout(self.activation(self.norm(self.up(self.embedding(x)))))
        return self.head(x * torch.softmax(x, -1))


def train(
    device: str,
    make: Callable[[Any], torch.optim.Optimizer],
    activation: nn.Module,
    dtype: torch.dtype,
) -> list[torch.Tensor]:
    """Losses, parameters and their last gradients after four steps, on the CPU."""
    torch.manual_seed(0)
    model = Net(activation).to(device, dtype)
    optimizer = make(model.parameters())
    batches = torch.randint(0, 17, (4, 2, 4, 6))
    torch.manual_seed(1)  # the batches came from the CPU's generator, dropout uses the device's
    losses = []
    for tokens, targets in batches:
        optimizer.zero_grad()
        logits = model(tokens.to(device)).flatten(0, 1)
        loss = F.cross_entropy(logits, targets.to(device).flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    parameters = list(model.parameters())
    return [t.detach().cpu() for t in (*losses, *parameters, *(p.grad for p in parameters))]


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "SGD foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "AdamW plain": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False, fused=False),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "Adagrad fused": lambda p: torch.optim.Adagrad(p, lr=0.01, fused=True),
}


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if "fused" in name])
def test_found_inf_skips_the_update_without_a_wait(name: str) -> None:
    def run(device: str) -> torch.Tensor:
        p = torch.ones(4, device=device, requires_grad=True)
        p.grad = torch.arange(4.0, device=device)
        optimizer: Any = OPTIMIZERS[name]([p])
        optimizer.step()  # not skipped: a skipped first step leaves fused SGD's momentum unset
        good = p.detach().clone()
        optimizer.grad_scale = None
        optimizer.found_inf = torch.ones((), device=device)
        optimizer.step()
        skipped = p.detach().clone()
        optimizer.found_inf = torch.zeros((), device=device)
        optimizer.step()
        return torch.stack([good, skipped, p.detach()])

    before = fake.counters()
    rows = run(NAME)
    assert (fake.counters() - before).synchronisations == 0
    good, skipped, further = rows.cpu()
    assert torch.equal(good, skipped)
    assert not torch.equal(skipped, further)
    assert torch.equal(rows.cpu(), run("cpu"))


@pytest.mark.parametrize("delay_microseconds", [0, 50])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_is_bit_identical_to_the_cpu(name: str, delay_microseconds: int) -> None:
    fake.set_delay(delay_microseconds)
    try:
        ours = train(NAME, OPTIMIZERS[name], nn.GELU(), torch.float32)
    finally:
        fake.set_delay(0)
    theirs = train("cpu", OPTIMIZERS[name], nn.GELU(), torch.float32)
    assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_training_in_other_dtypes(dtype: torch.dtype) -> None:
    ours = train(NAME, OPTIMIZERS["SGD foreach"], nn.ReLU(inplace=True), dtype)
    theirs = train("cpu", OPTIMIZERS["SGD foreach"], nn.ReLU(inplace=True), dtype)
    assert all(map(torch.equal, ours, theirs))


def convolutional() -> tuple[nn.Module, torch.Tensor]:
    layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(36, 5)), torch.randn(2, 3, 8, 8)


def transformer() -> tuple[nn.Module, torch.Tensor]:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
    return layer, torch.randn(2, 5, 16)


@pytest.mark.parametrize("make", [convolutional, transformer])
def test_other_models(make: Callable[[], tuple[nn.Module, torch.Tensor]]) -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    torch.manual_seed(0)
    model, x = make()
    twin = copy.deepcopy(model).to(NAME)
    with sdpa_kernel(SDPBackend.MATH):  # the one attention that the device has
        out, out_of_twin = model(x), twin(x.to(NAME))
    out.square().sum().backward()
    out_of_twin.square().sum().backward()
    assert torch.equal(out, out_of_twin.cpu())
    for p, q in zip((*model.parameters(), *model.buffers()), (*twin.parameters(), *twin.buffers())):
        assert torch.equal(p, q.cpu())
        assert p.grad is None or torch.equal(p.grad, q.grad.cpu())


def test_a_training_step_neither_waits_nor_allocates() -> None:
    torch.manual_seed(0)
    model = Net(nn.GELU()).to(NAME)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    tokens = torch.randint(0, 17, (4, 6)).to(NAME)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()

    for _ in range(3):
        step()
    fake.set_sync_debug_mode("error")
    try:
        before = fake.counters()
        with fake.held(fake.current_stream()):  # the whole step is enqueued, none of it has run
            step()
        counts = fake.counters() - before
    finally:
        fake.set_sync_debug_mode("default")
    assert counts.synchronisations == counts["alloc_below_cache"] == 0
    assert counts["kernel"] > 30
    assert all(p.isfinite().all().item() for p in model.parameters())


def test_backward_runs_on_the_streams_of_forward() -> None:
    x = torch.ones(4, device=NAME, requires_grad=True)
    side = fake.Stream()
    side.wait_stream(fake.current_stream())
    with fake.stream(side):
        y = (x * 3).sum()
    fake.current_stream().wait_stream(side)
    with fake.recorded_launches() as names:
        y.backward()
    assert f"0:{side.stream_id} aten::mul.out" in names
    assert x.grad is not None
    assert x.grad.tolist() == [3.0] * 4


def test_compiled_with_a_hook_that_writes_to_the_device() -> None:
    slots = torch.zeros(4, dtype=torch.int64, device=NAME)

    @torch.library.custom_op("fake_device_test::count_nan", mutates_args={"slots"})
    def count_nan(x: torch.Tensor, slots: torch.Tensor, index: int) -> None:
        slots[index].copy_(x.isnan().sum())

    @count_nan.register_fake
    def _(x: torch.Tensor, slots: torch.Tensor, index: int) -> None: ...

    model = nn.Linear(4, 4).to(NAME)
    model.register_forward_hook(lambda module, inputs, out: count_nan(out, slots, 1))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    compiled(torch.full((2, 4), float("nan"), device=NAME)).sum().backward()
    assert slots.tolist() == [0, 8, 0, 0]


def test_compiled_by_aot_eager() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).to(NAME)
    x = torch.ones(2, 4, device=NAME)
    out = torch.compile(model, backend="aot_eager", fullgraph=True)(x)
    out.sum().backward()
    assert torch.equal(out.detach().cpu(), model(x).detach().cpu())
