"""Where nothing but records is wanted C++ takes a dump's operators in: it writes, to the byte, what
Python writes.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import threading
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable, Optional

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import stateless
from torch.utils.checkpoint import checkpoint

import fastcheck
from fastcheck import _C
from fastcheck._extension import Status
from fastcheck._logread import read_log
from fastcheck._record import RECORD_BYTES
from fastcheck.dump.op_info import op_info
from fastcheck.dump.reading import read_index
from fastcheck.dump.recorded_op_calls import RecordedOpCalls
from training import Apply, Net, batches, chain

Step = Callable[[], object]


@contextlib.contextmanager
def in_python() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RecordedOpCalls, "make", classmethod(lambda *_: None))
        yield


def dumped(place: Path, step: Step, **options: Any) -> dict[str, bytes]:
    """The files that have to be the same whoever writes them."""
    with fastcheck.Dumper(os.fspath(place), **options) as dumper:
        step()
    assert dumper.problem == ""
    files = (place / "step0" / "rank0").iterdir()
    return {
        file.name: file.read_bytes()
        for file in files
        if file.name != "index.json" and not file.name.startswith("meta-")
    }


def check(tmp_path: Path, program: Callable[[], Step], **options: Any) -> dict[str, Any]:
    """Runs what ``program`` makes twice, from the same start; the index that C++ has written."""
    found = []
    for name, context in (("cpp", contextlib.nullcontext()), ("python", in_python())):
        torch.manual_seed(0)
        step = program()
        with context:
            found.append(dumped(tmp_path / name, step, **options))
    assert sorted(found[0]) == sorted(found[1])
    lines = [files["calls.jsonl"].decode().splitlines() for files in found]
    for ours, wanted in zip(*lines):
        assert ours == wanted
    assert found[0] == found[1]
    index = read_index(os.fspath(tmp_path / "cpp" / "step0" / "rank0"))
    assert index["calls"] == len(lines[0]) > 0
    by_python = read_index(os.fspath(tmp_path / "python" / "step0" / "rank0"))
    assert by_python["reused"] == 0
    by_python["reused"] = index["reused"]
    for one in (index, by_python):
        del one["started"], one["options"]
    assert index == by_python
    return index


# ---- Programs: each makes a step, alike each time ------------------------------------------------


def trained(model: nn.Module, optimizer: Callable[..., Any], **options: Any) -> Step:
    (x,) = batches(1)
    updates = optimizer(model.parameters(), lr=0.1, **options)

    def step() -> None:
        updates.zero_grad()
        model(x).square().mean().backward()
        updates.step()

    step()  # what the optimizer keeps is there
    return step


def training() -> Step:
    model = nn.Sequential(Net(dropout=0.5), nn.BatchNorm1d(4), nn.Linear(4, 2))
    return trained(model, torch.optim.AdamW)


def lists_of_parameters() -> Step:
    return trained(Net(), torch.optim.AdamW, foreach=True, amsgrad=True)


def fused() -> Step:
    return trained(Net(), torch.optim.Adam, fused=True)


def a_second_root() -> Step:
    model, loss = Net(), nn.MSELoss()
    (x,) = batches(1)
    return lambda: loss(model(x), torch.zeros(4, 4)).backward()


def shared_and_called_twice() -> Step:
    layer = nn.Linear(8, 8)
    model = chain(a=layer, act=nn.ReLU(inplace=True), b=layer)
    (x,) = batches(1)

    def step() -> None:
        (model(x) + model(x)).sum().backward()
        model(x).sum().backward()

    return step


def names_beyond_ascii() -> Step:
    model = nn.ModuleDict({'Größe "1"': nn.Linear(8, 8)})
    model.forward = lambda x: model['Größe "1"'](x)  # type: ignore[method-assign]
    (x,) = batches(1)
    return lambda: model(x).sum().backward()


def checkpointed(*, reentrant: bool) -> Step:
    inner, head = Net(), nn.Linear(4, 2)

    def forward(x: torch.Tensor) -> torch.Tensor:
        return head(checkpoint(inner, x.requires_grad_(), use_reentrant=reentrant))

    model = Apply(forward)
    (x,) = batches(1)
    return lambda: model(x).sum().backward()


def a_closure_of_the_optimizer() -> Step:
    inner, head = nn.Linear(8, 8), nn.Linear(8, 2)
    optimizer = torch.optim.SGD([*inner.parameters(), *head.parameters()], lr=0.1)
    (x,) = batches(1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = head(checkpoint(inner, x, use_reentrant=False)).sum()
        loss.backward()
        return loss

    return lambda: optimizer.step(closure)


def gradients_of_gradients() -> Step:
    x = torch.randn(4, 4, requires_grad=True)

    def step() -> None:
        (g,) = torch.autograd.grad(x.tanh().exp().sum(), x, create_graph=True)
        (g * x).sum().backward()

    return step


def dtypes() -> Step:
    def step() -> None:
        for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.int8):
            x = torch.arange(6).reshape(2, 3).to(dtype)
            (x + x).t().contiguous()
            x.clone().ne(0).to(dtype)
        z = torch.randn(4, dtype=torch.complex64)
        z.conj().mul(2)
        z.conj().imag.neg()
        torch.zeros(3, dtype=torch.float8_e4m3fn).view(torch.uint8).bool().logical_not()
        torch.full((2,), 2**62).mul(3)

    return step


def numbers() -> Step:
    inf, nan = float("inf"), float("nan")

    def step() -> None:
        x = torch.randn(3, 4)
        x.masked_fill(x > 0, -inf).softmax(-1)
        x.clamp(min=-1e-30, max=inf).nan_to_num(nan=nan)
        x.add(1e22).mul(0.1).div(3, rounding_mode="floor").pow(-0.0)
        torch.full((2,), nan)
        x.isnan(), x.log().isnan()
        torch.arange(0, 1, 0.25)
        torch.linspace(0, 1, 3)

    return step


def arguments() -> Step:
    def step() -> None:
        x = torch.randn(2, 3, 4)
        generator = torch.Generator().manual_seed(3)
        torch.randn(2, generator=generator)
        torch.empty(2, 3, memory_format=torch.contiguous_format, device="cpu").fill_(1)
        x.to(memory_format=torch.preserve_format, dtype=torch.float64)
        x.sum(dim=(0, 2), keepdim=True, dtype=torch.float64)
        x.flip(())
        x.scatter_reduce(0, torch.zeros(2, 3, 4, dtype=torch.int64), x, reduce="amax")
        x[torch.tensor([1]), :, torch.tensor([0, 2])].mul(True)
        x[None, ..., 1:2].expand(5, 2, 3, 1).sum()
        torch.cat([x, x[:1]]), torch.stack((x, x)), torch.einsum("abc,abc->b", x, x)
        torch.split(x, [1, 2], dim=1)
        torch._foreach_mul([x, x + 1], [2.0, 3])
        torch._foreach_mul([x.to(torch.complex64)] * 2, [2.0, 3j])
        torch._foreach_add_([torch.zeros(2) for _ in range(70)], [float(i) for i in range(70)])
        torch.meshgrid(torch.arange(2), torch.arange(3), indexing="ij")
        nn.functional.interpolate(x, scale_factor=1.5)

    return step


def written() -> Step:
    def step() -> None:
        x, out = torch.zeros(4, 4), torch.empty(4, 4)
        x.add_(1).t_().mul_(2)
        torch.mm(x, x, out=out)
        torch.max(x, 0, out=(torch.empty(4), torch.empty(4, dtype=torch.int64)))
        x[1] = 3
        x[:, ::2].copy_(out[:, ::2])
        x.index_put_((torch.tensor([0]), torch.tensor([1])), torch.tensor(5.0), accumulate=True)
        x.resize_(8, 8)
        x.zero_()
        x.data.add_(1)
        x.exp()
        x.numpy()[...] = 7
        x.exp()

    return step


def memory_that_nobody_wrote_to() -> Step:
    def step() -> None:
        x = torch.zeros(2, 4).new_empty(2, 4)
        x.shape, x.view(8)
        y = torch.empty(8)
        y[:4].fill_(1)
        y.view(2, 4)
        y[4:].fill_(2)
        y.add(1)
        torch.empty(0).add(1)
        torch.empty_like(y).zero_().exp()
        for _ in range(3):
            torch.empty(1000)
            torch.ones(1000).sin()  # at the address of what was freed

    return step


def other_layouts() -> Step:
    def step() -> None:
        x = torch.eye(3)
        x.to_sparse().mul(2).to_dense()
        torch.zeros(3, device="meta").add(1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its end has been announced
            torch.quantize_per_tensor(x, 0.1, 0, torch.qint8).dequantize()
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last).relu()
        freed = torch.ones(100)
        freed.untyped_storage().resize_(0)
        freed.view(10, 10)
        with torch.inference_mode():
            x.add(1).mul_(2)
        with torch.no_grad():
            x.requires_grad_().add(1)
        embedding = nn.Embedding(5, 3, sparse=True)
        embedding(torch.tensor([1, 1, 4])).sum().backward()

    return step


def freed_memory() -> Step:
    freed = torch.ones(1000)

    def step() -> None:
        freed.untyped_storage().resize_(0)
        torch.ops.aten.is_same_size(freed, freed)

    return step


def transformed() -> Step:
    model = Net()
    (x,) = batches(1)
    weights = dict(model.named_parameters())

    def step() -> None:
        torch.func.vmap(torch.sin)(x)
        torch.func.grad(lambda t: t.square().sum())(x)
        stateless._functional_call(model, weights, (x,))  # type: ignore[no-untyped-call]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model(x)

    return step


def errors_in_between() -> Step:
    def step() -> None:
        with contextlib.suppress(RuntimeError):
            torch.ones(2) + torch.ones(3)
        with contextlib.suppress(IndexError):
            torch.ones(2).sum(4)
        torch.ones(2).sin()

    return step


def more_than_fits() -> Step:
    x = torch.ones(3)

    def step() -> None:
        y = x
        for _ in range(700):
            y = y.sin()
        torch._foreach_exp([torch.ones(1) + i for i in range(1500)])

    return step


def several_threads() -> Step:
    x = torch.ones(3, requires_grad=True)

    def step() -> None:
        y = x.sin()
        other = threading.Thread(target=lambda: y.sum().backward())
        other.start()
        other.join()
        x.cos()

    return step


PROGRAMS: list[Callable[[], Step]] = [
    training,
    lists_of_parameters,
    fused,
    a_second_root,
    shared_and_called_twice,
    names_beyond_ascii,
    a_closure_of_the_optimizer,
    gradients_of_gradients,
    dtypes,
    numbers,
    arguments,
    written,
    memory_that_nobody_wrote_to,
    other_layouts,
    freed_memory,
    transformed,
    errors_in_between,
    more_than_fits,
    several_threads,
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda one: one.__name__)
def test_the_files_are_those_of_python(program: Callable[[], Step], tmp_path: Path) -> None:
    check(tmp_path, program)


@pytest.mark.parametrize("reentrant", [False, True])
def test_of_a_checkpointed_function(reentrant: bool, tmp_path: Path) -> None:
    check(tmp_path, lambda: checkpointed(reentrant=reentrant))
    records = read_log(os.fspath(tmp_path / "cpp" / "step0" / "rank0")).records
    assert any(records["flags"] & int(fastcheck.Flag.RECOMPUTE))


@pytest.mark.parametrize("record", ["health", "stats", "full"])
def test_at_each_depth(record: str, tmp_path: Path) -> None:
    check(tmp_path, training, record=record)


def test_two_dumps_in_one_another(tmp_path: Path) -> None:
    """Each numbers what it sees by itself."""

    def program() -> Step:
        inner, x = training(), torch.ones(3, requires_grad=True)

        def step() -> None:
            y = x.sin()
            with fastcheck.Dumper(os.fspath(tmp_path / "inner"), overwrite=True):
                inner()
            y.cos().sum().backward()

        return step

    check(tmp_path, program)


def used(monkeypatch: pytest.MonkeyPatch) -> list[Optional[RecordedOpCalls]]:
    """What make() has given since."""
    made: list[Optional[RecordedOpCalls]] = []
    make = RecordedOpCalls.make

    def spied(*args: Any) -> Optional[RecordedOpCalls]:
        made.append(make(*args))
        return made[-1]

    monkeypatch.setattr(RecordedOpCalls, "make", spied)
    return made


@pytest.mark.parametrize(
    ("options", "is_recorded"),
    [
        ({}, True),
        ({"record": "stats"}, True),
        ({"tensors": True}, False),
        ({"ops": ["aten.sin"]}, False),
        ({"order": "logical"}, False),
    ],
    ids=str,
)
def test_what_cpp_takes_in(
    options: dict[str, Any], is_recorded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = used(monkeypatch)
    assert dumped(tmp_path, lambda: torch.ones(3).sin(), **options)
    assert [one is not None for one in made] == [is_recorded]


def test_a_dump_without_the_extension_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The records but for their sums, which the portable backend has in another order."""
    with_it = dumped(tmp_path / "with", training())
    monkeypatch.setattr("fastcheck.dump.records.status", Status(None, "gone", None, None, None))
    without = dumped(tmp_path / "without", training())
    assert with_it["calls.jsonl"] == without["calls.jsonl"]


def test_nothing_is_kept_of_a_dump_that_is_over(tmp_path: Path) -> None:
    with fastcheck.Dumper(os.fspath(tmp_path)) as dumper:
        torch.ones(3).sin()
        session = weakref.ref(dumper._session)  # type: ignore[arg-type]
    del dumper
    gc.collect()
    assert session() is None


@pytest.mark.parametrize("name", ["begin", "end"])
def test_an_error_of_its_own_ends_the_dump_and_not_the_training(name: str, tmp_path: Path) -> None:
    class Broken:
        reused = 0

        def __getattr__(self, asked: str) -> Any:
            if asked == name:
                raise ZeroDivisionError("a fault")
            return lambda *_: asked

    make = RecordedOpCalls.make

    def broken(*args: Any) -> Optional[RecordedOpCalls]:
        made = make(*args)
        assert made is not None
        made._recorder = Broken()
        return made

    dumper = fastcheck.Dumper(os.fspath(tmp_path))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RecordedOpCalls, "make", broken)
        with pytest.warns(fastcheck.FastcheckWarning, match="ZeroDivisionError: a fault"), dumper:
            y = torch.ones(3).sin().cos()
    assert torch.equal(y, torch.ones(3).sin().cos()) and "a fault" in dumper.problem


class Seldom:
    """What the recorder leaves to Python, and a writer."""

    count = used = 0
    op_info = staticmethod(op_info)

    def module_text(self, node: object) -> tuple[str, str]:
        return '""', '"outside"'

    def site(self, *_: object) -> int:
        return 7

    def flush(self) -> None:
        self.used = 0


class TestTheType:
    """Nobody but fastcheck calls it."""

    def recorder(self, slots: int = 4) -> Any:
        python = Seldom()
        memory = torch.zeros(RECORD_BYTES * slots, dtype=torch.uint8)
        return _C.OpRecorder(python, python, memory, 3, 0)

    def begun(self, recorder: Any, x: torch.Tensor) -> Any:
        return recorder.begin(torch.ops.aten.sin.default, (x,), {}, None, False, False)

    def test_arguments_are_checked(self) -> None:
        recorder, other, x = self.recorder(), self.recorder(), torch.ones(3)
        with pytest.raises(TypeError, match="expected"):
            recorder.begin(1, 2, 3)
        with pytest.raises(TypeError, match="expected"):
            recorder.end(object(), (), {}, None, 0)
        with pytest.raises(TypeError, match=r"expected \(begin"):
            other.end(self.begun(recorder, x), (x,), {}, x, 0)
        with pytest.raises(TypeError, match=r"expected a torch\.Tensor"):
            _C.OpRecorder(object(), object(), "slots", 3, 0)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="depth"):
            _C.OpRecorder(object(), object(), torch.zeros(192, dtype=torch.uint8), 4, 0)

    def test_what_python_reads_in_between_is_counted(self) -> None:
        class Reader(Seldom):
            def tensor_text(self, tensor: torch.Tensor) -> str:
                return '"shape": []'

            def read_text(self, tensor: torch.Tensor, *_: object) -> str:
                assert (self.count, self.used) == (1, 1)
                self.count, self.used = 2, 2
                return '"seq": 1'

        python, x = Reader(), torch.ones(3)
        recorder = _C.OpRecorder(python, python, torch.zeros(RECORD_BYTES * 4).byte(), 3, 0)
        args = (x, torch.ones(3, device="meta"))
        call = recorder.begin(torch.ops.aten.add.Tensor, args, {}, None, False, False)
        assert (python.count, python.used) == (2, 2)
        line = recorder.end(call, args, {}, x + 1, 0)
        assert [one["seq"] for one in json.loads(line)["in"]] == [0, 1]
        assert [one["seq"] for one in json.loads(line)["out"]] == [2]

    def test_a_call_may_outlive_all_but_its_recorder(self) -> None:
        recorder, x = self.recorder(), torch.ones(3)
        calls = [self.begun(recorder, x) for _ in range(3)]
        recorder.clear()
        lines = [recorder.end(call, (x,), {}, x.sin(), n) for n, call in enumerate(calls)]
        assert [line[:9] for line in lines] == ['{"n": 0, ', '{"n": 1, ', '{"n": 2, ']
        assert recorder.reused == 2  # x, by the second and the third

    def test_a_cycle_through_it_is_collected(self) -> None:
        python: Any = Seldom()
        slots = torch.zeros(RECORD_BYTES, dtype=torch.uint8)
        python.recorder = _C.OpRecorder(python, python, slots, 3, 0)
        self.begun(python.recorder, torch.ones(3))
        gone = weakref.ref(python)
        del python
        gc.collect()
        assert gone() is None


def test_sites_are_the_same_numbers_again(tmp_path: Path) -> None:
    """An operator that runs in a loop has one site for each of its tensors."""

    def step() -> None:
        x = torch.ones(3)
        for _ in range(10):
            x = x.sin()

    dumped(tmp_path, step)
    log = read_log(os.fspath(tmp_path / "step0" / "rank0"))
    assert len(np.unique(log.records["site"])) == len(log.sites) == 3
