"""HookReader: the extension's and the Python one return the same for each kind of tensor."""

from __future__ import annotations

import os
from typing import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fastcheck.backends.portable.traversal import dtype_and_order
from fastcheck.ring.depths import Depths
from fastcheck.ring.host import (
    CAPACITY,
    ELSEWHERE,
    IS_BAD,
    IS_NEW,
    NEEDS_GRADIENT,
    NEW_STREAM,
    NO_SEQ,
    SEQ_SHIFT,
    UNKNOWN_DEVICE,
    UNREAD,
    HookReader,
    HostRing,
    identity_of,
    make_reader,
)
from fastcheck.utils.torch.seen_tensors import SeenTensors, make_seen

pytestmark = pytest.mark.fake_accelerator


needs_fake_device = pytest.mark.skipif(
    not os.environ.get("FASTCHECK_FAKE_DEVICE"), reason="make test-fake-device runs it"
)


class Reading:
    """A reader, what it remembers, and the ring that its records go to."""

    def __init__(self, kind: str) -> None:
        self.ring = HostRing(Depths(3), when_full=lambda: None)
        self.seen: SeenTensors = make_seen()
        self.reader: HookReader = (
            make_reader(self.seen, self.ring)
            if kind == "extension"
            else HookReader(self.seen, self.ring.write)
        )

    def __call__(self, tensor: torch.Tensor, seq: int = 7, *, any_dtype: bool = False) -> int:
        return self.reader.read(tensor, 0, 1, 2, 3, seq, 4, any_dtype)


@pytest.fixture(params=["extension", "python"])
def read(request: pytest.FixtureRequest) -> Reading:
    return Reading(request.param)


def test_a_new_tensor_has_a_record(read: Reading) -> None:
    x = torch.arange(1.0, 9.0)
    assert read(x) == 7 << SEQ_SHIFT | IS_NEW
    read.ring.used = 1
    record = read.ring.last()
    assert (record["seq"], record["site"], record["call"], record["step"]) == (7, 1, 2, 3)
    assert (record["flags"], record["max"], record["numel"]) == (4, 8.0, 8)


def test_one_that_was_read_has_its_token(read: Reading) -> None:
    x = torch.ones(8)
    read(x, 7)
    read.ring.slots.zero_()
    assert read(x, 9) == read(x.detach(), 9) == read(x.view(2, 4), 9) == 7 << SEQ_SHIFT
    assert not read.ring.slots.any(), "read again"
    x.add_(1)
    assert read(x, 9) == 9 << SEQ_SHIFT | IS_NEW


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_nonfinite(read: Reading, value: float) -> None:
    assert read(torch.tensor([1.0, value])) == 7 << SEQ_SHIFT | IS_NEW | IS_BAD


def test_whether_a_gradient_will_come(read: Reading) -> None:
    x = torch.ones(3, requires_grad=True)
    assert read(x * 2) & NEEDS_GRADIENT
    assert not read(x.detach() * 2) & NEEDS_GRADIENT


def test_integers(read: Reading) -> None:
    x = torch.arange(4)
    assert read(x) == UNREAD
    assert read(x, any_dtype=True) == 7 << SEQ_SHIFT | IS_NEW


def test_inference_tensors_are_always_new(read: Reading) -> None:
    with torch.inference_mode():
        x = torch.ones(4)
        assert read(x, 7) >> SEQ_SHIFT == 7
        assert read(x, 8) == 8 << SEQ_SHIFT | IS_NEW


def _fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(4)


UNPLAIN: dict[str, Callable[[], torch.Tensor]] = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    "fake": _fake,
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("kind", UNPLAIN)
def test_what_has_no_plain_memory(read: Reading, kind: str) -> None:
    assert read(UNPLAIN[kind](), any_dtype=True) == UNREAD


def test_what_functorch_wraps(read: Reading) -> None:
    found = []
    torch.vmap(lambda x: (found.append(read(x)), x)[1])(torch.ones(2, 3))
    torch.func.grad(lambda x: (found.append(read(x)), x.sum())[1])(torch.ones(3))
    assert found == [UNREAD, UNREAD]


def test_a_device_that_nobody_told_it_of(read: Reading) -> None:
    meta = torch.ones(2, device="meta")
    assert read(meta) == UNKNOWN_DEVICE
    read.reader.add_device(meta)
    assert read(meta) == UNREAD  # it has no memory


def test_what_is_remembered_as_unreadable(read: Reading) -> None:
    x = torch.ones(4)
    read.seen.add(x, NO_SEQ)
    assert read(x) == UNREAD


def test_freed_memory_is_refused(read: Reading) -> None:
    x = torch.ones(4)
    x.untyped_storage().resize_(0)
    with pytest.raises(Exception, match="storage"):
        read(x)


def test_a_slot_outside_of_the_ring() -> None:
    read = Reading("extension")
    with pytest.raises(IndexError, match="expected slots within a ring"):
        read.reader.read(torch.ones(2), CAPACITY, 0, 0, 0, 0, 0, False)


def test_wrong_arguments() -> None:
    reader = Reading("extension").reader
    with pytest.raises(TypeError, match=r"expected 8 arguments \(tensor, index, .*got 1"):
        reader.read(torch.ones(2))  # type: ignore[call-arg]  # what the test is about
    with pytest.raises(TypeError, match=r"expected a torch\.Tensor, got int"):
        reader.read(3, 0, 0, 0, 0, 0, 0, False)  # type: ignore[arg-type]  # the same
    with pytest.raises(TypeError):
        reader.read(torch.ones(2), "0", 0, 0, 0, 0, 0, False)  # type: ignore[arg-type]  # the same


@needs_fake_device
def test_elsewhere(read: Reading) -> None:
    from fakes import fake_device

    device = fake_device.load().name()
    first = torch.ones(2, 3, device=device)
    assert read(first) == UNKNOWN_DEVICE
    read.reader.add_device(first)
    for seq, tensor in enumerate(
        (first, first.half().t(), torch.ones(4, 4, device=device)[:, 1:], first.long())
    ):
        code = read(tensor, seq, any_dtype=True)
        assert code & (IS_NEW | ELSEWHERE) == IS_NEW | ELSEWHERE
        assert code >> SEQ_SHIFT == seq
        assert identity_of(code) == dtype_and_order(tensor)


@needs_fake_device
def test_another_stream_is_said() -> None:
    from fakes import fake_device

    module = getattr(torch, fake_device.load().name())
    read = Reading("extension")
    tensors = [torch.ones(2, device=module.current_device()) for _ in range(4)]
    read.reader.add_device(tensors[0])
    other = module.Stream()
    with module.stream(other):
        codes = [read(tensors[0], 0), read(tensors[1], 1)]
    codes += [read(tensors[2], 2), read(tensors[3], 3)]
    assert [bool(code & NEW_STREAM) for code in codes] == [True, False, True, False]
