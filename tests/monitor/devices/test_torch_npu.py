"""torch_npu's own wheel over the fake ACL runtime (fake_acl): discovery, memory, streams, and
install() as it is on a 910B. `make test-npu-lab` runs it, in an environment of its own.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import fastcheck
from fakes import fake_acl
from fastcheck.backends import npu
from fastcheck.backends.portable import backend as portable
from fastcheck.backends.portable.backend import any_nonfinite
from fastcheck.backends.table import backend_for
from fastcheck.types import DeviceMode
from fastcheck.utils.torch.streams import stream_handle, streams_of
from support.programs.guarding import why_unguarded
from support.programs.training import (
    Apply,
    assert_stops_with_the_culprit,
    batches,
    deep,
    poison,
    stopped,
    train,
    where,
    without_waiting,
)
from support.records.reference import DEPTHS, DTYPES, RECORD_BYTES, pattern
from support.records.torch_dtypes import torch_dtype

if os.environ.get("FAKE_ACL_SOC"):
    pytest.skip("of the chip that is there by default", allow_module_level=True)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch_npu's own, of a machine without CANN
    torch_npu: Any = fake_acl.load()
    # Autograd's threads ask for the default stream of each device that has a context, and torch_npu
    # makes it with the first work there.
    for device in range(torch_npu.device_count()):
        torch.zeros(1, device="cpu").to(f"npu:{device}")

# Said once in a process by torch_npu, of formats that are the hardware's business.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Cannot create tensor with internal format"),
    pytest.mark.filterwarnings("ignore:The current CANN and Soc versions require processing"),
]

DEVICES = ("npu:0", "npu:1")
WAITS = ("synchronisations", "alloc_below_cache")


@pytest.fixture(autouse=True)
def _fresh(one_thread: None) -> Iterator[None]:
    yield
    for index in range(len(DEVICES)):
        fake_acl.release(index)
        torch_npu.synchronize(index)
    torch_npu.set_device(0)


def spent(work: Any) -> dict[str, int]:
    """What ``work()`` makes the runtime do."""
    torch_npu.synchronize()
    before = fake_acl.counters()
    work()
    # Whatever is still in torch_npu's own queue is the host's work, not the device's.
    torch_npu.current_stream().native_handle  # noqa: B018  # read for what it starts
    return {name: count - before[name] for name, count in fake_acl.counters().items()}


class TestDevice:
    def test_it_is_the_wheel(self) -> None:
        module = sys.modules["torch_npu"]
        assert module.__version__.split("+")[0] == "2.13.0"
        assert torch_npu.device_count() == len(DEVICES)
        assert torch_npu.get_device_name().startswith("Ascend910B")

    @pytest.mark.parametrize("name", DEVICES)
    def test_discovery(self, name: str) -> None:
        device = torch.device(name)
        backend = backend_for(device)
        assert (backend.name, backend.device_mode) == ("portable", DeviceMode.IEEE)
        assert backend.overflow_status is None
        assert npu.overflow_mode(device) is DeviceMode.IEEE
        assert streams_of(device) is not None
        assert stats_of(torch.ones(3, device=device)) == stats_of(torch.ones(3))

    def test_pinned_copies_come_in_the_order_of_the_stream(self) -> None:
        streams = streams_of(torch.device("npu", 0))
        assert streams is not None
        x = torch.arange(64, dtype=torch.uint8, device="cpu").to("npu").view(1, 64)
        mirror = streams.pinned(1, 64)
        assert mirror.is_pinned()
        torch_npu.synchronize()
        fake_acl.hold()
        event = streams.new_event()
        mirror.copy_(x, non_blocking=True)
        event.record(streams.current())
        assert not event.query()
        assert mirror.sum() == 0
        fake_acl.release()
        event.synchronize()
        assert event.query()
        assert torch.equal(mirror, x.cpu())

    def test_streams_have_handles_of_their_own(self) -> None:
        first, second = torch_npu.current_stream(), torch_npu.Stream()
        handles = {stream_handle(first), stream_handle(second)}
        assert 0 not in handles and len(handles) == 2
        assert stream_handle(first) == first.npu_stream

    def test_a_stream_waits_for_another(self) -> None:
        x = torch.zeros(8, device="npu")
        side = torch_npu.Stream()
        torch_npu.synchronize()
        x.add_(1)
        side.wait_stream(torch_npu.current_stream())
        with torch_npu.stream(side):
            y = x * 2
        side.synchronize()
        assert y.cpu().tolist() == [2.0] * 8

    @pytest.mark.parametrize(
        ("call", "said"),
        [
            ("fake_acl.library().aclrtProcessReport(0)", "aclrtProcessReport"),
            (
                "fake_acl.load(); torch.ops.npu.npu_alloc_float_status(torch.ones(3).npu()).cpu()",
                "aclopCompileAndExecute: NPUAllocFloatStatus is not implemented",
            ),
            ("fake_acl.load(); torch.ones(3).npu().erfinv().cpu()", "Erfinv"),
        ],
    )
    def test_what_the_runtime_lacks_it_names(self, call: str, said: str) -> None:
        script = f"import torch; from fakes import fake_acl; {call}; print('went on')"
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=False
        )
        assert done.returncode in (-signal.SIGABRT, 1)
        assert said in done.stderr
        assert "went on" not in done.stdout


# ---- What reads tensors
# --------------------------------------------------------------------------------------------------


def stats_of(x: torch.Tensor, depth: str = "full") -> bytes:
    slots = torch.full((1, RECORD_BYTES), 0xA5, dtype=torch.uint8, device=x.device)
    portable.observe(x, slots, 0, DEPTHS[depth])
    return slots.cpu().numpy().tobytes()


def tensors_of(dtype: str) -> list[torch.Tensor]:
    found = []
    for size in (0, 2, 130, 4096, 3 * 4096 + 10):
        raw = bytearray(pattern("random", dtype, size, size) or bytes(16))
        found.append(torch.frombuffer(raw, dtype=torch_dtype(dtype))[:size])
    return found


@pytest.mark.parametrize("dtype", DTYPES)
class TestRecords:
    """The portable backend, through torch_npu's operators. NaN, infinities and subnormals among
    the values; operators compute as the CPU does, so that sums are equal too.
    """

    def test_one_by_one_and_as_a_list(self, dtype: str) -> None:
        on_host = tensors_of(dtype)
        try:
            on_device = [x.to("npu") for x in on_host]
        except RuntimeError as error:
            pytest.skip(f"torch_npu has none: {str(error).splitlines()[0]}")
        for x, y in zip(on_host, on_device):
            assert stats_of(x) == stats_of(y)
        for depth in DEPTHS.values():
            wanted, got = (
                torch.full((5, RECORD_BYTES), 0xA5, dtype=torch.uint8, device=device)
                for device in ("cpu", "npu")
            )
            portable.observe_list(on_host, wanted, 0, depth)
            portable.observe_list(on_device, got, 0, depth)
            assert torch.equal(wanted, got.cpu())
        found = any_nonfinite(on_device)
        assert found.item() == any_nonfinite(on_host).item()

    def test_nothing_waits(self, dtype: str) -> None:
        """Where torch_npu computes an operator on the host, this is how it shows."""
        try:
            xs = [x.to("npu") for x in tensors_of(dtype)]
        except RuntimeError as error:
            pytest.skip(f"torch_npu has none: {str(error).splitlines()[0]}")
        slots = torch.zeros(5, RECORD_BYTES, dtype=torch.uint8, device="npu")

        def read() -> None:
            for depth in DEPTHS.values():
                portable.observe(xs[-1], slots, 0, depth)
                portable.observe_list(xs, slots, 0, depth)
            any_nonfinite(xs)

        read()  # constants are copied once, and memory is got
        read()
        counts = spent(read)
        assert counts["kernel"] > 100
        assert counts["synchronisations"] == 0


# ---- install()
# --------------------------------------------------------------------------------------------------


class TestInstall:
    @pytest.mark.parametrize("sync", ["never", "step", "call"])
    def test_stops_with_the_culprit(self, sync: str) -> None:
        assert_stops_with_the_culprit("npu", sync)

    @pytest.mark.parametrize("record", ["health", "full"])
    def test_waits_for_nothing(self, record: str) -> None:
        model = deep(4).to("npu")
        monitor = fastcheck.install(model, stop=fastcheck.Stop(max_lag=None), record=record)
        train = without_waiting(model, [x.to("npu") for x in batches(3)])
        train()
        train()
        monitor.flush()
        counts = spent(train)
        assert counts["synchronisations"] == 0
        assert counts["async_copy"] >= 3  # the ring's, to pinned memory
        monitor.flush()
        assert len(monitor.records()) > 100
        assert monitor.events == ()

    def test_the_host_goes_on_while_the_device_is_busy(self) -> None:
        model = deep(2).to("npu")
        monitor = fastcheck.install(model, stop=fastcheck.Stop(max_lag=None))
        train = without_waiting(model, [x.to("npu") for x in batches(2)])
        train()
        monitor.flush()
        known = len(monitor.records())
        fake_acl.hold()
        train()
        assert len(monitor.records()) == known
        fake_acl.release()
        monitor.flush()
        assert len(monitor.records()) > known

    def test_a_copy_on_another_device(self) -> None:
        models = {name: deep(2).to(name) for name in DEVICES}
        monitor = fastcheck.install(*models.values(), overflow_nums=-1)
        for name, model in models.items():
            model.tail.function = poison if name == "npu:1" else Apply().function
            model(torch.ones(4, 8, device=name)).square().mean().backward()
        monitor.step()
        monitor.flush()
        assert {event.step for event in monitor.events} == {0}
        assert monitor.events[0].record["nan_count"] == 1
        assert torch_npu.current_device() == 0

    def test_training_is_bit_identical(self) -> None:
        def run(observed: bool) -> list[torch.Tensor]:
            torch.manual_seed(0)
            model = deep(3).to("npu")
            monitor = fastcheck.install(model) if observed else None
            without_waiting(model, [x.to("npu") for x in batches(4)])()
            if monitor is not None:
                monitor.remove()
            return [p.detach().cpu() for p in model.parameters()]

        assert all(torch.equal(a, b) for a, b in zip(run(False), run(True)))

    @pytest.mark.parametrize(
        ("kind", "reason"),
        [
            ("AdamW", "the fused kernel of npu does not look at found_inf"),
            ("SGD", "npu reads found_inf on the host"),
        ],
    )
    def test_no_update_is_called_protected(self, kind: str, reason: str) -> None:
        model = deep(1).to("npu")
        more = {"momentum": 0.9} if kind == "SGD" else {}
        optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1, fused=True, **more)
        said = why_unguarded(optimizer)
        assert said is not None and said.startswith(reason)

    def test_a_batch_that_was_bad_already(self) -> None:
        model = deep(2).to("npu")
        fastcheck.install(model, sync="call")
        x = torch.ones(4, 8)
        x[0, 0] = float("nan")  # of an infinity Tanh makes 1
        stop = stopped(train, model, data=iter([x.to("npu")]))
        assert where(stop.culprit)[3] == "arrived"
