"""The CUDA backend on a GPU: the CPU's records bit for bit, no wait, streams, graphs, install().

Skipped without a GPU, unless FASTCHECK_REQUIRE_GPU=1 makes that a failure. TestKernels is small
enough for compute-sanitizer (bench/on_gpu.sh). With FASTCHECK_TEST_DEVICE=cuda the tests of
statistics run on the GPU as well.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

import fastcheck
from backends.cuda.test_kernels import LAYOUTS
from fastcheck.backends import table as backends
from support.devices import on_device
from support.devices.on_device import assert_all_same, in_threads, of_cpu, random, rows
from support.helpers import SIZES, even, kinds, put, tensor_of
from support.programs.training import Net, batches, deep
from support.records.reference import DEPTHS, DTYPES, FLOAT_NAMES, pattern
from support.records.torch_dtypes import torch_dtype

pytestmark = pytest.mark.gpu

NAME = "cuda"
ALL = sorted(DTYPES)
MIB = 2**20


@pytest.fixture(scope="module")
def cuda() -> backends.Backend:
    entry = backends.backend_for(torch.device(NAME))
    assert entry.name == "cuda", backends.cuda.cuda_problem()
    return entry


@pytest.fixture(autouse=True)
def _fresh(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    yield
    torch.cuda.synchronize()


@contextmanager
def no_wait() -> Iterator[None]:
    """Whatever makes the host wait for the GPU raises."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


slots_for = functools.partial(on_device.slots_for, device=NAME)


def large(dtype: str, count: int, seed: int = 0) -> torch.Tensor:
    """Random bits, drawn in one go: every class of value."""
    generator = np.random.default_rng(seed)
    raw = generator.integers(0, 256, count * torch_dtype(dtype).itemsize, dtype=np.uint8)
    if dtype == "bool":
        raw &= 1
    return torch.from_numpy(raw).view(torch_dtype(dtype))


def test_the_kernels_are_what_reads() -> None:
    assert backends.cuda.cuda_problem() is None
    assert backends.backend_for(torch.device(NAME, 0)).determinism == "bitwise"


class TestKernels:
    """Every kernel, small: some seconds, and some minutes under compute-sanitizer."""

    @pytest.mark.parametrize("dtype", ALL)
    def test_every_depth(self, cuda: backends.Backend, dtype: str) -> None:
        hosts = [random(dtype, count, count) for count in (0, 1, 63, 4096, 4097, 20 * 4096 + 77)]
        hosts.append(hosts[-1][1:])  # not aligned to 16 bytes
        there = [put(x, NAME) for x in hosts[:-1]]
        there.append(there[-1][1:])
        for depth, level in DEPTHS.items():
            slots = slots_for(len(hosts) + 1)
            cuda.observe_list(there, slots, 0, level)
            cuda.observe(there[-1], slots, len(hosts), level)
            assert_all_same(slots, of_cpu([*hosts, hosts[-1]], depth), depth)

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "complex64"])
    def test_layouts(self, cuda: backends.Backend, dtype: str) -> None:
        x = random(dtype, 12000, 8)
        hosts = [layout(x) for layout in LAYOUTS.values()]
        slots = slots_for(len(hosts))
        cuda.observe_list([put(y, NAME) for y in hosts], slots, 0, 3)
        assert_all_same(slots, of_cpu(hosts))

    def test_a_long_list(self, cuda: backends.Backend) -> None:
        hosts = [random("bfloat16", 41 * i, i) for i in range(70)]
        slots = slots_for(len(hosts))
        cuda.observe_list([put(x, NAME) for x in hosts], slots, 0, 3)
        assert_all_same(slots, of_cpu(hosts))

    @pytest.mark.parametrize("dtype", FLOAT_NAMES)
    def test_found_nonfinite(self, cuda: backends.Backend, dtype: str) -> None:
        x = torch.ones(30000, dtype=torch_dtype(dtype))
        assert cuda.found_nonfinite([x.to(NAME)]).item() == 0.0
        x[29999] = float("nan")
        assert cuda.found_nonfinite([x.to(NAME)]).item() == 1.0
        assert cuda.found_nonfinite([x.to(NAME)[::7]]).item() == 0.0

    @pytest.mark.parametrize("dtype", FLOAT_NAMES)
    def test_exponents(self, cuda: backends.Backend, dtype: str) -> None:
        assert cuda.exponents is not None
        x = random(dtype, 12000, 8)
        for layout in LAYOUTS.values():
            host = layout(x)
            there, here = fastcheck.exponents(put(host, NAME)), fastcheck.exponents(host)
            assert list(there.words) == list(here.words)

    @pytest.mark.parametrize("dtype", FLOAT_NAMES)
    def test_record_and_exponents(self, cuda: backends.Backend, dtype: str) -> None:
        assert cuda.observe_and_count is not None
        x = random(dtype, 40000, 8)
        slots = slots_for(2)
        for layout in LAYOUTS.values():
            host = layout(x)
            there = put(host, NAME)
            cuda.observe(there, slots, 0, 3)
            words = cuda.observe_and_count(there, slots, 1)
            record, same = slots.cpu()
            assert torch.equal(record, same)
            assert words.tolist() == list(fastcheck.exponents(host).words)


class TestBits:
    @pytest.mark.parametrize("dtype", ALL)
    def test_sizes_and_kinds(self, cuda: backends.Backend, dtype: str) -> None:
        hosts = [
            tensor_of(pattern(kind, dtype, even(size, dtype), size), dtype)
            for kind in kinds(dtype)
            for size in SIZES
        ]
        for depth, level in DEPTHS.items():
            slots = slots_for(len(hosts))
            cuda.observe_list([put(x, NAME) for x in hosts], slots, 0, level)
            assert_all_same(slots, of_cpu(hosts, depth), depth)

    @pytest.mark.parametrize("dtype", ALL)
    @pytest.mark.parametrize("order", ["storage", "logical"])
    def test_layouts(self, cuda: backends.Backend, dtype: str, order: str) -> None:
        x = random(dtype, 12000, 8)
        hosts = [layout(x) for layout in LAYOUTS.values()]
        slots = slots_for(len(hosts))
        cuda.observe_list([put(y, NAME) for y in hosts], slots, 0, 3, logical=order == "logical")
        assert_all_same(slots, of_cpu(hosts, order=order))

    @pytest.mark.parametrize("dtype", ALL)
    def test_large_random_bits(self, cuda: backends.Backend, dtype: str) -> None:
        """Thousands of chunks, with every class of value in every tile; and an odd offset."""
        x = large(dtype, 24 * MIB // torch_dtype(dtype).itemsize + 12345, 1)
        there = x.to(NAME)
        slots = slots_for(2)
        cuda.observe(there, slots, 0, 3)
        cuda.observe(there[1:], slots, 1, 3)
        assert_all_same(slots, of_cpu([x, x[1:]]))

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
    def test_every_bit_pattern(self, cuda: backends.Backend, dtype: str) -> None:
        """A tile of each pattern, so that it is what a tile's extremes are made of."""
        bits = 8 * torch_dtype(dtype).itemsize
        patterns = np.arange(2**bits, dtype=f"<u{bits // 8}")
        x = torch.from_numpy(np.repeat(patterns, 64).view(np.uint8)).view(torch_dtype(dtype))
        hosts = [x, torch.from_numpy(patterns.view(np.uint8)).view(torch_dtype(dtype))]
        slots = slots_for(2)
        cuda.observe_list([put(y, NAME) for y in hosts], slots, 0, 3)
        assert_all_same(slots, of_cpu(hosts))

    @pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
    def test_one_unusual_value(self, cuda: backends.Backend, dtype: str) -> None:
        """In one of many tiles, at every lane."""
        specials = (0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1e-44, 2.0**61, 2.0**-41)
        hosts = []
        for k, value in enumerate(specials):
            for place in range(0, 64 * 5, 5):
                x = torch.ones(3 * 4096 + 50, dtype=torch_dtype(dtype))
                x[(4096 * (place % 4) + place * 7 + k) % x.numel()] = value
                hosts.append(x)
        slots = slots_for(len(hosts))
        cuda.observe_list([put(x, NAME) for x in hosts], slots, 0, 3)
        assert_all_same(slots, of_cpu(hosts))

    def test_beyond_32_bits(self, cuda: backends.Backend) -> None:
        if torch.cuda.mem_get_info()[0] < 5 * 2**30:
            pytest.skip("needs 5 GiB of GPU memory")
        x = torch.zeros(2**31 + 4096 * 3 + 5, dtype=torch.int8)
        x[:: 2**20 + 1] = 77
        x[-1] = -128
        there = x.to(NAME)
        slots = slots_for(2)
        cuda.observe(there, slots, 0, 3)
        cuda.observe(there[3:], slots, 1, 3)
        assert_all_same(slots, of_cpu([x, x[3:]]))

    def test_again_and_again(self, cuda: backends.Backend) -> None:
        """Whichever block comes last."""
        x = large("float32", 3 * MIB, 5)
        there, slots = x.to(NAME), slots_for(300)
        for i in range(300):
            cuda.observe(there, slots, i, 3)
        assert set(rows(slots)) == set(of_cpu([x]))

    def test_public_functions(self) -> None:
        x = large("float16", 100003, 2)
        for y in (x, x[:90000].view(300, 300).t(), x[::3]):
            for order in ("storage", "logical"):
                there = fastcheck.stats(put(y, NAME), order=order)
                assert there.record.tobytes() == fastcheck.stats(y, order=order).record.tobytes()
        assert fastcheck.checksum(x.to(NAME)) == fastcheck.checksum(x)


class TestNothingWaits:
    def test_calls(self, cuda: backends.Backend) -> None:
        xs = [torch.randn(1000 + i, device=NAME) for i in range(100)]
        slots = slots_for(101)
        for _ in range(2):
            with no_wait():
                cuda.observe(xs[0], slots, 100, 3)
                cuda.observe_list(xs, slots, 0, 3)
                cuda.found_nonfinite(xs)

    def test_a_busy_device_is_not_waited_for(self, cuda: backends.Backend) -> None:
        """Tables of lists are not used again while an earlier copy is still to come."""
        lists = [[torch.full((50 + i,), float(k)) for i in range(60)] for k in range(5)]
        there = [[x.to(NAME) for x in xs] for xs in lists]
        slots = slots_for(300)
        with no_wait():
            torch.cuda._sleep(200_000_000)
            for k, xs in enumerate(there):
                cuda.observe_list(xs, slots, 60 * k, 3)
            assert not torch.cuda.current_stream().query()
        assert_all_same(slots, of_cpu([x for xs in lists for x in xs]))

    def test_training(self) -> None:
        model = Net(64).to(NAME)
        monitor = fastcheck.install(model, stop=fastcheck.Stop(max_lag=None), overflow_nums=-1)
        train = on_device.without_waiting(model, [x.to(NAME) for x in batches(5, 16, 64)])
        train()
        monitor.flush()
        with no_wait():
            train()
        monitor.flush()
        assert len(monitor.records()) > 100

    def test_the_trace_of_a_training_step_shows_no_wait(self) -> None:
        model = Net(64).to(NAME)
        monitor = fastcheck.install(model, stop=fastcheck.Stop(max_lag=None), overflow_nums=-1)
        train = on_device.without_waiting(model, [x.to(NAME) for x in batches(5, 16, 64)])
        train()
        monitor.flush()
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            train()
        names = [event.name for event in profile.events()]
        assert any("records_kernel" in name for name in names)
        # Not cudaDeviceSynchronize: the profiler waits with that at its end.
        waits = {"cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy"}
        assert not waits.intersection(names)


class TestStreams:
    def test_many_at_once(self, cuda: backends.Backend) -> None:
        hosts = [large("float32", MIB + 4096 * k, k) for k in range(8)]
        there = [x.to(NAME) for x in hosts]
        slots = slots_for(8 * 20)
        torch.cuda.synchronize()
        streams = [torch.cuda.Stream() for _ in hosts]
        for i in range(20):
            for k, stream in enumerate(streams):
                with torch.cuda.stream(stream):
                    cuda.observe(there[k], slots, 8 * i + k, 3)
        torch.cuda.synchronize()
        assert_all_same(slots, of_cpu(hosts) * 20)

    def test_threads(self, cuda: backends.Backend) -> None:
        hosts = [large("bfloat16", 5000 * k + 3, k) for k in range(1, 60)]
        wanted = of_cpu(hosts)

        def work(number: int) -> None:
            default = torch.cuda.default_stream()
            with torch.cuda.stream(default if number < 3 else torch.cuda.Stream()):
                for _ in range(10):
                    there = [x.to(NAME) for x in hosts[number:]]
                    slots = slots_for(len(there))
                    cuda.observe_list(there, slots, 0, 3)
                    assert_all_same(slots, wanted[number:])

        in_threads(6, work)


class TestGraphs:
    """A graph of launches, replayed with other data: slots are written anew each time. (install()
    in a captured step is another matter: docs/gpu-status.md.)"""

    def capture(
        self, cuda: backends.Backend, xs: list[torch.Tensor], slots: torch.Tensor
    ) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # kernels are loaded outside of the capture
            cuda.observe_list(xs, slots, 0, 3)
            cuda.observe(xs[0], slots, 0, 3)
            cuda.found_nonfinite(xs)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for x in xs:
                x.mul_(1.25)
            cuda.observe_list(xs, slots, 0, 3)
            cuda.observe(xs[0], slots, len(xs), 3)
            found = cuda.found_nonfinite(xs)
            torch.ones(MIB, device=NAME).mul_(3)  # takes what the launches gave back to the pool
        return graph, found

    @pytest.mark.parametrize("count", [3, 100])
    def test_100_replays(self, cuda: backends.Backend, count: int) -> None:
        """100 tensors need a table outside of a capture."""
        hosts = [large("float32", 4096 * 7 + 600 * i, i).nan_to_num(0, 0, 0) for i in range(count)]
        xs = [x.to(NAME) for x in hosts]
        slots = slots_for(count + 1)
        graph, found = self.capture(cuda, xs, slots)
        for replay in range(100):
            for i, x in enumerate(xs):
                x.copy_(torch.randn_like(x))
                if replay % 10 == 3 and i == 1:
                    x[5] = float("inf")
            slots.fill_(0xEE)
            cuda.observe(torch.ones(MIB, device=NAME), slots, 0, 3)  # between replays
            graph.replay()
            after = [x.cpu() for x in xs]
            assert_all_same(slots, of_cpu([*after, after[0]]), replay)
            assert found.item() == float(replay % 10 == 3)

    def test_two_graphs_at_once(self, cuda: backends.Backend) -> None:
        groups = [[torch.randn(MIB + k, device=NAME) for k in range(3)] for _ in range(2)]
        slots = [slots_for(4) for _ in groups]
        graphs = [self.capture(cuda, xs, s)[0] for xs, s in zip(groups, slots)]
        streams = [torch.cuda.Stream() for _ in groups]
        for _ in range(20):
            torch.cuda.synchronize()
            for graph, stream in zip(graphs, streams):
                with torch.cuda.stream(stream):
                    graph.replay()
            torch.cuda.synchronize()
            for xs, s in zip(groups, slots):
                after = [x.cpu() for x in xs]
                assert_all_same(s, of_cpu([*after, after[0]]))


class TestInstall:
    @pytest.mark.parametrize("sync", ["never", "step", "call"])
    def test_stops_with_the_culprit(self, sync: Any) -> None:
        on_device.assert_stops_with_the_culprit(NAME, sync)

    @pytest.mark.parametrize("record", ["health", "full"])
    def test_training_stays_bit_identical(self, record: Any) -> None:
        def run(is_observed: bool) -> list[torch.Tensor]:
            torch.manual_seed(0)
            model = Net(64, dropout=0.1).to(NAME)
            if is_observed:
                fastcheck.install(model, record=record)
            optimizer = torch.optim.AdamW(model.parameters(), fused=True)
            for x in batches(10, 16, 64):
                optimizer.zero_grad()
                model(x.to(NAME)).square().mean().backward()
                optimizer.step()
            return [p.detach().cpu() for p in model.parameters()]

        assert all(torch.equal(a, b) for a, b in zip(run(False), run(True)))

    def test_a_bad_gradient_does_not_reach_the_weights(self) -> None:
        model = deep(3).to(NAME)
        monitor = fastcheck.install(
            model, overflow_nums=-1, stop=fastcheck.Stop(protect_weights=True)
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        for step, x in enumerate(batches(6)):
            optimizer.zero_grad()
            loss = model(x.to(NAME)).square().mean()
            (loss * float("nan") if step == 3 else loss).backward()
            optimizer.step()
        assert all(bool(p.isfinite().all()) for p in model.parameters())
        monitor.flush()
        assert {event.step for event in monitor.events} == {3}
