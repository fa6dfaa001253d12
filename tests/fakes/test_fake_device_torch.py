"""torch on the fake accelerator: ops, random numbers, two devices, streams, autocast."""

from __future__ import annotations

import copy
import io
import threading
import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fakes import fake_device

fake: Any = fake_device.load()
NAME = fake.name()

pytestmark = [pytest.mark.fake_accelerator, pytest.mark.usefixtures("fake_accelerator")]


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
    this = threading.current_thread()
    before = fake.counters(this)
    state = fake.get_rng_state()
    first = torch.rand(4, device=NAME)
    fake.set_rng_state(state)
    second = torch.rand(4, device=NAME)
    assert (fake.counters(this) - before).synchronisations == 0
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
    this = threading.current_thread()
    before = fake.counters(this)
    with fake.held(fake.current_stream()):
        ring[2].add_(100)
        mirror[2:5].copy_(ring[2:5], non_blocking=True)
        ring[2].zero_()  # after the copy, in stream order
        event = fake.current_stream().record_event()
        # What is under way is filled with NaN (bytes of 255) until it arrives.
        assert mirror[2:5].eq(255).all()
        assert mirror[:2].eq(77).all() and mirror[5:].eq(77).all()
    counts = fake.counters(this) - before
    assert (counts.synchronisations, counts["async_copy"], counts["alloc"]) == (0, 1, 0)
    event.synchronize()
    assert mirror[2].tolist() == [110, 111, 112, 113, 114]
    assert mirror[3:5].flatten().tolist() == list(range(15, 25))
    assert mirror[:2].eq(77).all() and mirror[5:].eq(77).all()


def test_lists_that_are_written_have_another_version() -> None:
    for device in (NAME, "cpu"):
        x, y = torch.ones(3, device=device), torch.ones(3, device=device)
        torch._foreach_mul_([x], [y])
        assert (x._version, y._version) == (1, 0)
        torch._foreach_mul([x], [y])
        assert x._version == 1


@pytest.mark.parametrize("order", [1.0, 2.0, float("inf")])
def test_foreach_norm(order: float) -> None:
    tensors = [torch.randn(5, 3), torch.tensor([1.0, float("inf")]), torch.randn(7).half()]
    this = threading.current_thread()
    before = fake.counters(this)
    ours = torch._foreach_norm([t.to(NAME) for t in tensors], order)
    assert (fake.counters(this) - before)["kernel"] == len(tensors) + 1  # the uploads, one for all
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
    this = threading.current_thread()
    before = fake.counters(this)
    for scale in (1.0, float("inf"), 1.0):
        with torch.autocast(NAME, dtype=torch.bfloat16):
            out = model(torch.full((2, 4), scale, device=NAME))
        assert out.dtype == torch.bfloat16
        optimizer.zero_grad()
        scaler.scale(out.float().sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert (fake.counters(this) - before).synchronisations == 0
    assert scaler.get_scale() == 4.0
    assert model.weight.isfinite().all().item()
