"""override() computes chosen operators elsewhere, and changes nothing else."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import fastcheck
from fastcheck.log.reader import read_log
from support.programs.training import Net, batches

WIDE = torch.float32


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="module", autouse=True)
def _lossy() -> Iterator[None]:
    """``overlab::square``, whose results are right in float32 and coarse in float16."""
    library = torch.library.Library("overlab", "DEF")
    library.define("square(Tensor x) -> Tensor")
    library.define("noise(Tensor x) -> Tensor")

    def square(x: torch.Tensor) -> torch.Tensor:
        return x * x if x.dtype is torch.float32 else (x * x) * 0.75

    def soft(x: torch.Tensor, half_to_float: bool) -> torch.Tensor:
        if half_to_float and x.dtype is not torch.float16:
            raise RuntimeError("conversion is supported for Half type only")
        y = torch.softmax(x, -1)
        return y.float() if half_to_float else y

    library.define("soft(Tensor x, bool half_to_float) -> Tensor")
    library.impl("soft", soft, "CPU")
    library.impl("square", square, "CPU")
    library.impl("noise", lambda x: x + torch.rand(()).to(x.dtype), "CPU")
    yield
    library._destroy()


def square(x: torch.Tensor) -> torch.Tensor:
    return torch.ops.overlab.square(x)


def test_a_result_of_the_wider_dtype_in_the_narrow_one() -> None:
    x = torch.full((4, 3), 3.0, dtype=torch.float16).t()
    with fastcheck.override("overlab.square", dtype=WIDE) as chosen:
        y = square(x)
        z = x + x
    assert y.dtype is torch.float16
    assert y.stride() == square(x).stride()
    assert torch.equal(y, torch.full_like(y, 9.0))
    assert torch.equal(square(x), torch.full_like(y, 6.75))
    assert torch.equal(z, x + x)
    assert chosen.ran == {"overlab.square": 1}
    assert chosen.left_out == {}


def test_what_is_as_wide_already_is_left_alone() -> None:
    def losses(around: Any) -> list[float]:
        torch.manual_seed(0)
        model = Net(dropout=0.5)
        optimizer = torch.optim.Adam(model.parameters())
        found = []
        with around:
            for x in batches(3):
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                found.append(loss.item())
        return found

    chosen = fastcheck.override(dtype=WIDE)
    assert losses(chosen) == losses(contextlib.nullcontext())
    assert not chosen.ran
    assert chosen.left_out["aten.addmm"] == "nothing in it is narrower"
    chosen = fastcheck.override(device="cpu")
    assert losses(chosen) == losses(contextlib.nullcontext())
    assert chosen.left_out["aten.addmm"] == "it runs there already"


def test_gradients_are_those_of_the_wider_dtype() -> None:
    """And the graph is that of the run without it: the same leaves, a second derivative too."""

    def gradients(dtype: torch.dtype, around: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.Softmax(-1), nn.Linear(64, 1)).to(dtype)
        x = torch.randn(256, 64).to(torch.float32).to(dtype).requires_grad_()
        with around:
            (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
            gradient.square().sum().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    exact = gradients(torch.float64, contextlib.nullcontext())
    plain = gradients(torch.float32, contextlib.nullcontext())
    chosen = fastcheck.override(dtype=torch.float64)
    better = gradients(torch.float32, chosen)
    assert len(exact) == len(plain) == len(better)
    assert all(one.dtype is torch.float32 for one in better)
    assert any("backward" in name for name in chosen.ran)

    def error(found: list[torch.Tensor]) -> float:
        return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, exact))

    assert error(better) < 0.5 * error(plain)
    assert error(better) < 1e-6


def test_dropout_has_the_same_mask() -> None:
    def run(around: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        torch.manual_seed(1)
        x = torch.full((1000,), 1.1, dtype=torch.float16, requires_grad=True)
        with around:
            y = functional.dropout(x, 0.3)
            y.sum().backward()
        return y.detach(), x.grad, torch.get_rng_state()

    chosen = fastcheck.override(dtype=WIDE)
    y, gradient, state = run(chosen)
    plain, plain_gradient, plain_state = run(contextlib.nullcontext())
    assert torch.equal(y == 0, plain == 0)
    assert 200 < int((y == 0).sum()) < 400
    assert torch.allclose(y, plain, rtol=2e-3)
    assert torch.equal(gradient == 0, plain_gradient == 0)
    assert torch.equal(state, plain_state)
    assert y[y != 0][0] == torch.tensor(float(torch.tensor(1.1).half()) / 0.7).half()


def test_native_dropout_has_the_same_mask() -> None:
    def run(around: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        torch.manual_seed(1)
        with around:
            y, mask = torch.native_dropout(torch.full((1000,), 1.1).half(), 0.3, True)
        return y, mask, torch.get_rng_state()

    chosen = fastcheck.override("aten.native_dropout", dtype=WIDE)
    (y, mask, state), (_, plain_mask, plain_state) = run(chosen), run(contextlib.nullcontext())
    assert chosen.ran["aten.native_dropout"] == 1
    assert torch.equal(mask, plain_mask)
    assert torch.equal(state, plain_state)
    assert torch.equal(y != 0, mask)
    everything, _ = torch.native_dropout(torch.ones(8).half(), 1.0, True)
    with fastcheck.override("aten.native_dropout", dtype=WIDE):
        assert torch.equal(torch.native_dropout(torch.ones(8).half(), 1.0, True)[0], everything)


def test_in_place() -> None:
    x = torch.full((8,), 1000.0, dtype=torch.float16)
    tail, version = x[4:], x._version
    with fastcheck.override("aten.addcmul_", dtype=WIDE) as chosen:
        y = tail.addcmul_(tail, tail, value=1e-3)
    assert y is tail
    assert chosen.ran == {"aten.addcmul_": 1}
    assert torch.equal(x, torch.tensor([1000.0] * 4 + [2000.0] * 4).half())
    assert x._version > version
    out = torch.empty(3, dtype=torch.float16)
    with fastcheck.override("aten.mul", dtype=WIDE) as chosen:
        result = torch.mul(torch.ones(3).half(), 3.0, out=out)
        many = torch._foreach_mul([torch.ones(2).half(), torch.ones(3).half()], 2.0)
    assert result is out
    assert torch.equal(out, torch.full((3,), 3.0).half())
    assert chosen.ran["aten.mul.out"] == 1
    assert [float(one.sum()) for one in many] == [4.0, 6.0]


def test_an_in_place_op_that_is_lossy_is_computed_from_what_was_there() -> None:
    """Written twice it would be 4, or 6."""
    x = torch.ones(4).half()
    with fastcheck.override("aten.add_", dtype=WIDE):
        x.add_(x)
    assert torch.equal(x, torch.full((4,), 2.0).half())
    wide = torch.ones(4)
    with fastcheck.override("aten.add_", dtype=WIDE) as chosen:
        wide.add_(torch.ones(4).half())
    assert chosen.ran["aten.add_.Tensor"] == 1
    assert torch.equal(wide, torch.full((4,), 2.0))


def test_what_is_wider_stays_wide() -> None:
    x = torch.full((4,), 1 / 3, dtype=torch.float64)
    with fastcheck.override(dtype=WIDE) as chosen:
        y = x * x
        mixed = torch.ones(4).half() * x
    assert torch.equal(y, x * x)
    assert torch.equal(mixed, x)
    assert chosen.ran == {"aten.mul.Tensor": 1}


def test_random_operators_are_told_apart() -> None:
    x = torch.ones(8).half()
    torch.manual_seed(3)
    plain, after = x.clone().bernoulli_(0.5), torch.rand(())
    torch.manual_seed(3)
    with fastcheck.override(dtype=WIDE) as chosen:
        y, then = x.clone().bernoulli_(0.5), torch.rand(())
    assert torch.equal(y, plain)
    assert torch.equal(then, after)
    assert chosen.left_out["aten.bernoulli_.float"] == "it draws random numbers"
    chosen = fastcheck.override("overlab.noise", dtype=WIDE)  # its schema declares that it doesn't
    torch.manual_seed(3)
    plain, after = torch.ops.overlab.noise(x), torch.rand(())
    torch.manual_seed(3)
    warns = pytest.warns(fastcheck.FastcheckWarning, match="left every operator as it is.*random")
    with warns as caught, chosen:
        y, then = torch.ops.overlab.noise(x), torch.rand(())
    assert caught[0].filename == __file__
    assert torch.equal(y, plain)
    assert torch.equal(then, after)


def test_softmax_of_mixed_precision() -> None:
    x = torch.randn(4, 8).half()
    with fastcheck.override("aten.softmax", dtype=WIDE) as chosen:
        y = functional.softmax(x, -1)
        z = functional.softmax(x, -1, dtype=torch.float32)
    # What has been made float32 before is as wide as it can be.
    assert chosen.ran["aten._softmax"] == 1
    assert chosen.left_out["aten._softmax"] == "nothing in it is narrower"
    assert y.dtype is torch.float16
    assert z.dtype is torch.float32
    assert torch.allclose(y.float(), z, atol=1e-3)
    # As CUDA's kernel does it, which takes float16 alone with this.
    with fastcheck.override("overlab.soft", dtype=WIDE) as chosen:
        w = torch.ops.overlab.soft(x, True)
    assert chosen.ran == {"overlab.soft": 1}
    assert torch.equal(w, torch.softmax(x.float(), -1))


def test_modules_and_calls() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Square(), Square()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([self.first(x), self.second(x)])

    class Square(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return square(x)

    model, x = Two(), torch.full((1,), 3.0).half()
    for options, wanted in (
        ({"modules": "second"}, [6.75, 9.0]),
        ({"modules": ["first"], "ops": "square"}, [9.0, 6.75]),
        ({"ops": "overlab.square #1"}, [6.75, 9.0]),
        ({"ops": "first · overlab.square"}, [9.0, 6.75]),
    ):
        with fastcheck.override(**options, dtype=WIDE):
            assert model(x).tolist() == wanted, options


def test_an_api_by_its_name() -> None:
    x = torch.ones(2, 2).half()
    with fastcheck.override("Functional.linear.1", dtype=WIDE) as chosen:
        functional.linear(x, x)
        functional.linear(x, x)
    assert sum(chosen.ran.values()) == 1


@pytest.mark.parametrize("name", ["matmul", "aten.matmul", "aten.matmul · forward"])
def test_a_composite_operator_is_what_it_is_made_of(name: str) -> None:
    x, y = (torch.randn(2, 3, 3).half().requires_grad_() for _ in range(2))
    for product in (torch.matmul, lambda x, y: x @ y, lambda x, y: x.matmul(y)):
        with fastcheck.override(name, dtype=WIDE) as chosen:
            (product(x, y) + x.bmm(y)).sum().backward()
        expected = 1 if "forward" in name else 3
        assert chosen.ran["aten.bmm"] == expected


def test_dropout_by_its_name() -> None:
    x = torch.ones(100).half()
    torch.manual_seed(3)
    plain = functional.dropout(x, 0.3)
    torch.manual_seed(3)
    with fastcheck.override("dropout", dtype=WIDE) as chosen:
        y = nn.Dropout(0.3)(x) + x * 3
    assert torch.equal(y == 3, plain == 0)
    assert set(chosen.ran) | set(chosen.left_out) >= {"aten.bernoulli_.float", "aten.div_.Scalar"}
    assert chosen.ran["aten.mul.Tensor"] == 1


def test_the_backward_of_what_is_named() -> None:
    x = torch.ones(2, 2).half().requires_grad_()
    with fastcheck.override("aten.mm", dtype=WIDE) as chosen:
        (x @ x.detach()).sum().backward()
    assert chosen.ran == {"aten.mm": 2}
    with fastcheck.override("aten.mm · backward", dtype=WIDE) as chosen:
        (x @ x.detach()).sum().backward()
    assert chosen.ran == {"aten.mm": 1}


def test_the_backward_of_another_name() -> None:
    x = torch.ones(2).half().requires_grad_()
    with fastcheck.override("aten.relu", dtype=WIDE) as chosen:
        torch.relu(x * 2).sum().backward()
    assert chosen.ran == {"aten.relu": 1, "aten.threshold_backward": 1}


def test_names_that_mean_nothing() -> None:
    with pytest.raises(fastcheck.ConfigError, match=r"did you mean 'aten\.softmax'"):
        fastcheck.override("aten.sofmax", dtype=WIDE)
    for options, message in (
        ({"ops": "aten.mm"}, r"no call in the block has the name 'aten\.mm'"),
        ({"modules": "haed"}, "did you mean 'head'"),
    ):
        chosen: Any = fastcheck.override(**options, dtype=WIDE)
        with pytest.raises(fastcheck.ConfigError, match=message), chosen:
            Net()(torch.ones(1, 8))
    # And no complaint about names on top of what has ended the block.
    with pytest.raises(ZeroDivisionError), fastcheck.override("aten.mm", dtype=WIDE):
        raise ZeroDivisionError
    assert torch._C._len_torch_dispatch_stack() == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "changes nothing"),
        ({"dtype": torch.int32}, "dtype must be a floating-point dtype"),
        ({"dtype": "float32"}, "dtype must be a floating-point dtype"),
        ({"device": "nowhere"}, "device must be"),
        ({"dtype": torch.float32, "modules": 3}, "modules must be a string or a list"),
        ({"dtype": torch.float32, "modules": ()}, "modules holds no name"),
    ],
)
def test_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(fastcheck.ConfigError, match=message):
        fastcheck.override("aten.mm", **options)


@pytest.mark.parametrize(
    "options", [{"random": True, "dtype": WIDE}, {"random": 1, "device": "cpu"}]
)
def test_random_is_for_another_device(options: dict[str, Any]) -> None:
    with pytest.raises(fastcheck.ConfigError, match="random= is for another device's generator"):
        fastcheck.override(**options)


def test_again_and_within_itself() -> None:
    chosen = fastcheck.override("overlab.square", dtype=WIDE)
    for count in (1, 2):
        with chosen:
            square(torch.ones(1).half())
            with pytest.raises(fastcheck.ConfigError, match="already entered"):
                chosen.__enter__()
        assert chosen.ran["overlab.square"] == count
    x = torch.full((1,), 3.0).half()
    with fastcheck.override("aten.add", dtype=WIDE), fastcheck.override("square", dtype=WIDE):
        assert (square(x) + 1).item() == 10.0


def test_what_raises_raises_as_ever() -> None:
    with fastcheck.override(dtype=WIDE), pytest.raises(RuntimeError, match="mat1 and mat2"):
        torch.mm(torch.ones(2, 3).half(), torch.ones(2, 3).half())


def test_under_a_monitor(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It sees what comes out."""
    monkeypatch.chdir(tmp_path)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).half()
    x = torch.full((2, 8), 60000.0).half()
    with fastcheck.install(model, overflow_nums=-1) as monitor:
        with fastcheck.override(dtype=WIDE):
            wanted = model(x).detach()
        records = monitor.records()
    outputs = [r for r in records if monitor.sites[r["site"]].role == "output"]
    assert outputs[-1]["max"] == float(wanted.max())


def test_what_was_compiled_is_seen() -> None:
    def backend(graph: Any, inputs: Any) -> Any:
        return lambda *args: (torch.zeros(1),)  # what it runs is not to be recognised

    compiled = torch.compile(square, backend=backend)
    x = torch.full((1,), 3.0).half()
    assert compiled(x).item() == 0.0
    with fastcheck.override("overlab.square", dtype=WIDE) as chosen:
        assert compiled(x).item() == 9.0
    assert chosen.ran == {"overlab.square": 1}
    assert compiled(x).item() == 0.0


def test_a_dumper_that_is_entered_after_it_dumps_what_comes_out(tmp_path: Any) -> None:
    x = torch.full((1,), 3.0).half()
    chosen = fastcheck.override("overlab.square", dtype=WIDE)
    with chosen, fastcheck.Dumper(tmp_path, ops="overlab.square"):
        square(x)
    (log,) = tmp_path.glob("step0/rank0")
    records = [r for r in read_log(str(log)).records if r["max"] > 3.5]
    assert [float(r["max"]) for r in records] == [9.0]
