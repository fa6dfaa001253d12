"""torch on the fake accelerator: ops, random numbers, two devices, training as on the CPU."""

from __future__ import annotations

import copy
import io
import time
from typing import Any, Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fake_device

fake: Any = fake_device.load()
NAME = fake.name()

pytestmark = pytest.mark.usefixtures("fake_accelerator")


# ---- Ops -----------------------------------------------------------------------------------------


def test_what_is_not_implemented_says_so() -> None:
    with pytest.raises(NotImplementedError, match=r"aten::linalg_eig is not implemented"):
        torch.linalg.eig(torch.eye(3, device=NAME))


def test_every_listed_op_exists() -> None:
    assert torch.ops.fake_device.unknown_ops() == []


def test_devices_do_not_mix() -> None:
    x = torch.ones(3, device=NAME)
    with pytest.raises(RuntimeError):
        x + torch.ones(3)
    with pytest.raises(RuntimeError):
        x + torch.ones(3, device=f"{NAME}:1")
    with pytest.raises(RuntimeError, match="on one device"):
        x.index_select(0, torch.zeros(1, dtype=torch.int64, device=f"{NAME}:1"))
    assert (x + torch.tensor(2.0)).sum().item() == 9


def test_a_host_scalar_is_read_when_the_op_is_launched() -> None:
    x, by = torch.zeros(2, device=NAME), torch.tensor(1.0)
    with fake.held(fake.current_stream()):
        x.add_(by)
        by.fill_(50)
    assert x.tolist() == [1.0, 1.0]


def test_views_share_memory() -> None:
    x = torch.zeros(4, 6, device=NAME)
    x.t()[1].unsqueeze(0).add_(1)
    x.view(2, 12)[:, 0] = 5
    expected = torch.zeros(4, 6)
    expected[:, 1] = 1
    expected.view(2, 12)[:, 0] = 5
    assert torch.equal(x.cpu(), expected)
    z = torch.view_as_complex(x.view(4, 3, 2)).conj()
    assert z.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    assert torch.equal(z.cpu(), torch.view_as_complex(expected.view(4, 3, 2)).conj())


def test_masks_and_positions() -> None:
    x = torch.arange(6.0, device=NAME)
    x[x > 3] = 0
    x[torch.tensor([0, 1])] = 9
    assert x[x > 2].tolist() == [9.0, 9.0, 3.0]


def test_modes_see_only_the_ops_that_were_called() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Names(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    x = torch.ones(2, 3, device=NAME)
    with Names():
        F.layer_norm(x, (3,)).softmax(-1)
    assert seen == ["aten.native_layer_norm.default", "aten._softmax.default"]


# ---- Random numbers, two devices, the rest of torch ----------------------------------------------


def test_random_numbers_are_the_cpus() -> None:
    for make in (torch.rand, torch.randn):
        torch.manual_seed(5)
        on_cpu = make(7)
        torch.manual_seed(5)
        assert torch.equal(make(7, device=NAME).cpu(), on_cpu)
    generator = torch.Generator(device=NAME)
    generator.manual_seed(3)
    drawn = torch.randperm(9, device=NAME, generator=generator).cpu()
    assert torch.equal(drawn, torch.randperm(9, generator=torch.Generator().manual_seed(3)))


def test_the_generators_state_needs_no_wait() -> None:
    before = fake.counters()
    state = fake.get_rng_state()
    first = torch.rand(4, device=NAME)
    fake.set_rng_state(state)
    second = torch.rand(4, device=NAME)
    assert (fake.counters() - before).synchronisations == 0
    assert torch.equal(first.cpu(), second.cpu())


def test_two_devices() -> None:
    x = torch.ones(4, device=f"{NAME}:1")
    assert (x.device.index, fake.current_device()) == (1, 0)
    with fake.device(1):
        assert torch.zeros(1, device=NAME).device.index == 1
    torch.accelerator.set_device_index(1)
    assert torch.accelerator.current_device_index() == fake.current_device() == 1


def test_a_copy_waits_for_the_device_it_reads() -> None:
    x = torch.ones(4, device=f"{NAME}:1")
    with fake.held(fake.default_stream(1)):
        x.add_(1)
        y = x.to(f"{NAME}:0").clone()
        copied = fake.current_stream(0).record_event()
        time.sleep(0.05)  # time for device 0 to run ahead
        assert not copied.query()
    assert y.sum().item() == 8


def test_a_copy_waits_for_the_device_it_writes() -> None:
    x, y = torch.ones(4, device=f"{NAME}:1"), torch.zeros(4, device=f"{NAME}:0")
    with fake.held(fake.default_stream(0)):
        before = y.clone()
        y.copy_(x)
        time.sleep(0.05)  # time for device 1 to run ahead
    assert (before.sum().item(), y.sum().item()) == (0, 4)


def test_torch_accelerator_sees_it() -> None:
    assert torch.accelerator.current_accelerator() == torch.device(NAME)
    assert torch.accelerator.device_count() == 2
    side = torch.Stream(device=f"{NAME}:0")
    torch.accelerator.set_stream(side)
    try:
        assert torch.accelerator.current_stream() == side == fake.current_stream()
    finally:
        torch.accelerator.set_stream(fake.default_stream())


def test_generic_streams_and_events() -> None:
    device = torch.device(NAME, 0)
    main, side = torch.accelerator.current_stream(device), torch.Stream(device)
    event, late = torch.Event(device), torch.Event(device)
    assert event.query()  # never recorded: complete
    x = torch.zeros(4, device=device)
    main.synchronize()
    with fake.held(main):
        x.add_(1)
        event.record(main)
        side.wait_event(event)
        with side:
            assert torch.accelerator.current_stream(device) == side
            y = x + 1
            x.record_stream(side)
            y[:2].record_stream(main)
            late.record()
        time.sleep(0.05)  # time for the side stream to run ahead
        assert not event.query() and not late.query() and not side.query()
    late.synchronize()
    assert event.query() and late.query()
    event.wait(side)
    assert y.tolist() == [2.0] * 4
    assert torch.accelerator.current_stream(device) == main


def test_rows_of_bytes_reach_pinned_memory_without_a_wait() -> None:
    """What a drain does: some of a ring's slots, to the same rows of a pinned mirror."""
    ring = torch.arange(40, dtype=torch.uint8, device=NAME).view(8, 5)
    mirror = torch.full((8, 5), 77, dtype=torch.uint8).pin_memory()
    before = fake.counters()
    with fake.held(fake.current_stream()):
        ring[2].add_(100)
        mirror[2:5].copy_(ring[2:5], non_blocking=True)
        ring[2].zero_()  # after the copy, in stream order
        event = fake.current_stream().record_event()
        assert mirror.eq(77).all()
    counts = fake.counters() - before
    assert (counts.synchronisations, counts["async_copy"], counts["alloc"]) == (0, 1, 0)
    event.synchronize()
    assert mirror[2].tolist() == [110, 111, 112, 113, 114]
    assert mirror[3:5].flatten().tolist() == list(range(15, 25))
    assert mirror[:2].eq(77).all() and mirror[5:].eq(77).all()


@pytest.mark.parametrize("order", [1.0, 2.0, float("inf")])
def test_foreach_norm(order: float) -> None:
    tensors = [torch.randn(5, 3), torch.tensor([1.0, float("inf")]), torch.randn(7).half()]
    before = fake.counters()
    ours = torch._foreach_norm([t.to(NAME) for t in tensors], order)
    assert (fake.counters() - before)["kernel"] == len(tensors) + 1  # the uploads, one for all
    for mine, theirs in zip(ours, torch._foreach_norm(tensors, order)):
        assert torch.equal(mine.cpu(), theirs)


def test_state_dicts_and_copies() -> None:
    model = nn.Linear(3, 2).to(NAME)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file)["weight"]
    assert loaded.device == model.weight.device
    assert torch.equal(loaded.cpu(), copy.deepcopy(model).weight.detach().cpu())


def test_autocast_and_grad_scaler() -> None:
    model = nn.Linear(4, 4).to(NAME)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = torch.amp.GradScaler(NAME, init_scale=8.0)
    before = fake.counters()
    for scale in (1.0, float("inf"), 1.0):
        with torch.autocast(NAME, dtype=torch.bfloat16):
            out = model(torch.full((2, 4), scale, device=NAME))
        assert out.dtype == torch.bfloat16
        optimizer.zero_grad()
        scaler.scale(out.float().sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert (fake.counters() - before).synchronisations == 0
    assert scaler.get_scale() == 4.0
    assert model.weight.isfinite().all().item()


# ---- Training ------------------------------------------------------------------------------------


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
