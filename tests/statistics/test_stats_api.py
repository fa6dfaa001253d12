"""fastcheck.stats, found_nonfinite and torch.ops.fastcheck: fields, types, lists, tracing."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

import fastcheck
from fastcheck.statistics.functions import crc32
from fastcheck.types import Stats, StatsList
from support.helpers import DEVICE, ON_CPU, assert_same, cpu_only, kernel, put
from support.records.reference import DTYPES, FLOAT_NAMES, VALUE_BYTES, record
from support.records.torch_dtypes import torch_dtype

pytestmark = [pytest.mark.fake_statistics, pytest.mark.fake_cuda]


HOST_X = torch.tensor([1.0, -2.0, 0.0, float("nan"), float("inf"), 4.0])
X = put(HOST_X)
COUNTS = [
    *("numel", "nan_count", "posinf_count", "neginf_count"),
    *("zero_count", "subnormal_count", "negative_count", "saturated_count"),
]


# --- Stats ---------------------------------------------------------------------------------------


def test_fields() -> None:
    s = fastcheck.stats(X)
    assert isinstance(s, Stats)
    assert [getattr(s, name) for name in COUNTS] == [6, 1, 1, 0, 1, 0, 1, 0]
    assert (s.nonfinite_count, s.finite_count, s.positive_count) == (2, 4, 2)
    assert (s.min, s.max, s.abs_max) == (-2.0, 4.0, 4.0)
    assert (s.sum, s.abs_sum, s.sum_sq) == (3.0, 7.0, 21.0)
    assert (s.mean, s.rms, s.l2_norm) == (0.75, math.sqrt(5.25), math.sqrt(21.0))
    assert (s.dtype, s.order, s.to_dict()["record"]) == ("float32", "storage", "full")
    assert s.checksum == fastcheck.checksum(X)


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_every_dtype_with_plain_python_numbers(dtype: str) -> None:
    x = torch.tensor([1, 0, 1, 1]).to(torch_dtype(dtype))
    s = fastcheck.stats(put(x))
    components = DTYPES[dtype].components
    zeros = 1 if components == 1 else 5  # the imaginary parts
    assert (s.dtype, s.numel, s.zero_count) == (dtype, 4, zeros)
    assert (s.finite_count, s.positive_count) == (4 * components, 3)
    assert (s.sum, s.abs_sum, s.sum_sq) == (3.0, 3.0, 3.0)
    kind = float if dtype in FLOAT_NAMES else int
    assert (s.min, type(s.min), s.max, type(s.max)) == (0, kind, 1, kind)
    for name, value in s.to_dict().items():
        assert type(value) in (int, float, str), name
    assert_same(s.record.tobytes(), record(x))


def test_extremes_beyond_float64_are_exact() -> None:
    top = 2**64 - 1
    s = fastcheck.stats(put(torch.tensor([top - 1, top], dtype=torch.uint64)))
    assert (s.min, s.max, s.saturated_count) == (top - 1, top, 1)
    s = fastcheck.stats(put(torch.tensor([-(2**63), 2**63 - 1])))
    assert (s.min, s.max, s.abs_max, s.saturated_count) == (-(2**63), 2**63 - 1, 2**63, 2)


def test_nothing_finite_and_nothing_at_all() -> None:
    s = fastcheck.stats(put(torch.full((3,), float("nan"))))
    assert (s.min, s.max, s.abs_max, s.sum) == (math.inf, -math.inf, 0, 0.0)
    assert s.mean is not None and math.isnan(s.mean)
    assert s.rms is not None and math.isnan(s.rms)
    empty = fastcheck.stats(put(torch.empty(0, 3)))
    assert (empty.numel, empty.finite_count, empty.sum, empty.l2_norm) == (0, 0, 0.0, 0.0)
    whole = fastcheck.stats(put(torch.empty(0, dtype=torch.int16)))
    assert (whole.min, whole.max) == (2**63 - 1, -(2**63))
    for s in (empty, whole):
        assert "numel=0" in repr(s)


@pytest.mark.parametrize("computed", ["health", "stats", "full"])
def test_what_is_computed(computed: str) -> None:
    s = fastcheck.stats(X, record=computed)
    assert s.to_dict()["record"] == computed
    assert_same(s.record.tobytes(), record(HOST_X, depth=computed))
    beyond = {
        "health": [
            "min",
            "max",
            "sum",
            "abs_sum",
            "sum_sq",
            "mean",
            "rms",
            "l2_norm",
            "abs_max",
            "checksum",
        ],
        "stats": ["checksum"],
        "full": [],
    }[computed]
    for name in beyond:
        assert getattr(s, name) is None
    assert set(s.to_dict()).isdisjoint(beyond)
    assert "nan=1" in repr(s)
    assert ("checksum" in repr(s)) == (computed == "full")


def test_order() -> None:
    x = put(torch.arange(12.0).reshape(3, 4).t())
    assert fastcheck.stats(x).order == "storage"
    assert fastcheck.stats(x, order="logical").order == "logical"
    assert fastcheck.stats(x[::2]).order == "logical"
    assert fastcheck.stats(x, order="logical") == fastcheck.stats(x.contiguous())
    assert fastcheck.stats(x) != fastcheck.stats(x.contiguous())
    assert fastcheck.checksum(x, order="logical") == fastcheck.checksum(x.contiguous())


def test_equality_is_of_the_value_fields() -> None:
    a, b = fastcheck.stats(X), fastcheck.stats(X.clone())
    assert a == b and hash(a) == hash(b) and (a != b) is False
    assert a != fastcheck.stats(X, record="stats")
    changed = X.clone()
    changed[2] = -0.0
    assert a != fastcheck.stats(changed)
    assert a != fastcheck.stats(X[:5])
    assert a != a.record and a != 3 and a is not None
    slots = torch.zeros(192, dtype=torch.uint8)
    fastcheck._C.observe(HOST_X, slots, 0, 3, 5, 6, 7, 8, 2)
    assert Stats(slots) == a  # seq, step, call, site and flags take no part
    assert slots.numpy().tobytes()[VALUE_BYTES:] != a.record.tobytes()[VALUE_BYTES:]


def test_the_record_as_numpy() -> None:
    s = fastcheck.stats(X)
    scalar = s.record
    assert scalar.dtype == fastcheck.types.RECORD_DTYPE
    assert (scalar["nan_count"], scalar["sum"], scalar["min"]) == (1, 3.0, -2.0)
    assert scalar.tobytes() == s.tensor.cpu().numpy().tobytes()
    assert (s.tensor.dtype, s.tensor.shape) == (torch.uint8, (192,))
    assert s.tensor.device == X.device


def test_to_dict() -> None:
    d = fastcheck.stats(X).to_dict()
    assert {name: d[name] for name in COUNTS} == dict(zip(COUNTS, [6, 1, 1, 0, 1, 0, 1, 0]))
    assert (d["min"], d["max"], d["sum"], d["dtype"]) == (-2.0, 4.0, 3.0, "float32")


def test_printing() -> None:
    text = repr(fastcheck.stats(X))
    for part in ("float32", "numel=6", "nan=1", "+inf=1", "min=-2", "max=4", "mean=0.75", "zero=1"):
        assert part in text, part
    assert f"{fastcheck.checksum(X):016x}" in text
    assert "\n" not in text
    clean = repr(fastcheck.stats(put(torch.ones(3, dtype=torch.int64))))
    assert "all finite" in clean and "min=1 max=1" in clean
    assert "saturated=2" in repr(
        fastcheck.stats(put(torch.tensor([127, -128, 3], dtype=torch.int8)))
    )


def test_copying_and_pickling() -> None:
    s = fastcheck.stats(X)
    for other in (pickle.loads(pickle.dumps(s)), copy.copy(s), copy.deepcopy(s)):
        assert other == s and other.record.tobytes() == s.record.tobytes()


def test_stats_keep_what_was_read() -> None:
    x = X.clone()
    s = fastcheck.stats(x)
    x.zero_()
    assert s.nan_count == 1
    record_before = s.record.tobytes()
    s.tensor.zero_()
    assert s.record.tobytes() == record_before


def test_reading_leaves_tensor_autograd_and_rng_alone() -> None:
    x = torch.randn(5000, device=DEVICE, requires_grad=True)
    y = x * 2
    before, version, rng = y.detach().clone(), y._version, torch.get_rng_state()
    for read in (fastcheck.stats, fastcheck.checksum, crc32, fastcheck.found_nonfinite):
        out = read(y)
        assert not getattr(out, "requires_grad", False)
    if ON_CPU:
        assert not torch.ops.fastcheck.stats(y).requires_grad
    assert torch.equal(y, before) and y._version == version
    assert torch.equal(rng, torch.get_rng_state())
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(gradient, torch.full((5000,), 2.0, device=DEVICE))


def test_inference_mode_parameters_and_subclasses() -> None:
    with torch.inference_mode():
        inside = torch.ones(5, device=DEVICE)
        assert fastcheck.stats(inside).sum == 5.0
    assert fastcheck.stats(inside).sum == 5.0
    assert fastcheck.stats(torch.nn.Parameter(torch.ones(5, device=DEVICE))).sum == 5.0

    class Plain(torch.Tensor):
        pass

    assert fastcheck.stats(torch.ones(5, device=DEVICE).as_subclass(Plain)).sum == 5.0


# --- lists ---------------------------------------------------------------------------------------


def test_list() -> None:
    host = [
        HOST_X,
        torch.arange(10),
        torch.empty(0, dtype=torch.bool),
        HOST_X.view(2, 3).t(),
        torch.ones(5000).bfloat16(),
    ]
    xs = [put(x) for x in host]
    many = fastcheck.stats(xs)
    assert isinstance(many, StatsList)
    assert len(many) == 5
    assert (many.tensor.dtype, many.tensor.shape) == (torch.uint8, (5, 192))
    assert many.numpy().dtype == fastcheck.types.RECORD_DTYPE and many.numpy().shape == (5,)
    assert many.tensor.device == X.device
    for x, on_host, one, row in zip(xs, host, many, many.numpy()):
        assert isinstance(one, Stats)
        assert one == fastcheck.stats(x)
        assert_same(row.tobytes(), record(on_host))
    assert many[-1] == many[4] == fastcheck.stats(xs[4])
    assert [s.numel for s in many[1:3]] == [10, 0]
    assert isinstance(many[1:3], StatsList)
    with pytest.raises(IndexError, match="5 tensors"):
        many[5]
    assert repr(many).count("Stats(") == 5
    assert fastcheck.stats(tuple(xs), record="health")[0].min is None
    assert fastcheck.stats([xs[3]], order="logical")[0].order == "logical"


def test_empty_list() -> None:
    many = fastcheck.stats([])
    assert len(many) == 0 and list(many) == [] and many.numpy().shape == (0,)


def test_a_long_list() -> None:
    xs = [torch.full((k % 7 + 1,), float(k), device=DEVICE) for k in range(1000)]
    sums = fastcheck.stats(xs).numpy()["sum"]
    assert (sums == np.array([float(k * (k % 7 + 1)) for k in range(1000)])).all()


# --- found_nonfinite -----------------------------------------------------------------------------


def test_found_nonfinite() -> None:
    good, bad = torch.ones(5000, device=DEVICE), torch.ones(5000, device=DEVICE)
    bad[4999] = float("-inf")
    for tensors, wanted in (
        ([good], 0.0),
        ([good, bad], 1.0),
        ((bad,), 1.0),
        (bad, 1.0),
        (good, 0.0),
        (iter([good, bad]), 1.0),
        ([], 0.0),
        ([torch.arange(5, device=DEVICE), good.bool()], 0.0),
    ):
        found = fastcheck.found_nonfinite(tensors)
        assert (found.dtype, found.shape, float(found)) == (torch.float32, (), wanted)
        assert found.device == (good.device if tensors != [] else torch.device("cpu"))


@pytest.mark.parametrize("dtype", FLOAT_NAMES)
def test_found_nonfinite_in_every_float_dtype(dtype: str) -> None:
    x = torch.ones(4097).to(torch_dtype(dtype))
    assert float(fastcheck.found_nonfinite([put(x)])) == 0.0
    values = ["nan"] if dtype == "float8_e4m3fn" else ["nan", "inf", "-inf"]
    for value in values:
        for place in (0, 4095, 4096):
            y = x.clone()
            y[place] = torch.tensor(float(value)).to(x.dtype)
            assert float(fastcheck.found_nonfinite([put(x), put(y)])) == 1.0


# --- torch.ops.fastcheck -------------------------------------------------------------------------

OPS = torch.ops.fastcheck
ROWS = torch.zeros(2, 192, dtype=torch.uint8, device=DEVICE)
SAMPLES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "stats": (OPS.stats, (X,)),
    "stats, depth and order": (OPS.stats, (X, 2, True)),
    "stats, grad": (OPS.stats, (put(torch.ones(3)).requires_grad_(),)),
    "stats, strided": (OPS.stats, (put(torch.ones(6, 4))[:, ::2],)),
    "stats, bool": (OPS.stats, (put(torch.tensor([True])),)),
    "stats_list": (OPS.stats_list, ([X, put(torch.ones(2, 3))],)),
    "checksum": (OPS.checksum, (X,)),
    "found_nonfinite": (OPS.found_nonfinite, ([X, put(torch.ones(2))],)),
    "observe_": (OPS.observe_, (X, ROWS, 1, 3, 0, 0, 0, 0, 0)),
}


@pytest.mark.parametrize("sample", sorted(SAMPLES))
def test_opcheck(sample: str) -> None:
    op, arguments = SAMPLES[sample]
    # torch checks the registration for autograd on the devices that it supports.
    known = ("test_autograd_registration",) if DEVICE in ("cpu", "cuda", "xpu") else ()
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic", *known)
    opcheck(op.default, arguments, test_utils=checks)


def test_ops_agree_with_the_functions() -> None:
    y = put(torch.arange(24).reshape(4, 6).t())
    for x in (X, y, put(torch.zeros(4000, dtype=torch.complex64).conj())):
        assert_same(OPS.stats(x).cpu().numpy().tobytes(), kernel(x))
        assert_same(OPS.stats(x, 1, True).cpu().numpy().tobytes(), kernel(x, "health", "logical"))
        assert int(OPS.checksum(x)) % 2**64 == fastcheck.checksum(x)
        found = OPS.found_nonfinite([x])
        assert (found.device, found.item()) == (x.device, fastcheck.found_nonfinite(x).item())
    assert int(OPS.checksum(y, True)) % 2**64 == fastcheck.checksum(y, order="logical")
    rows = OPS.stats_list([X, y], 2)
    assert rows.device == X.device
    assert_same(rows[0].cpu().numpy().tobytes(), kernel(X, "stats"))
    assert_same(rows[1].cpu().numpy().tobytes(), kernel(y, "stats"))
    assert not OPS.stats(X.clone().requires_grad_()).requires_grad


def test_an_op_puts_a_record_into_its_slot() -> None:
    slots = torch.zeros(3, 192, dtype=torch.uint8, device=DEVICE)
    OPS.observe_(X, slots, 2, 3, 17, -5, 2**40, 2**41, 4)
    record = slots[2].cpu().numpy()
    assert_same(record[:VALUE_BYTES].tobytes(), kernel(X)[:VALUE_BYTES])
    got = record.view(fastcheck.types.RECORD_DTYPE)[0]
    assert [got[name] for name in ("site", "call", "step", "seq")] == [17, -5, 2**40, 2**41]
    assert got["flags"] == 4 | fastcheck.types.Flag.NONFINITE
    assert not slots[:2].any()


@cpu_only
def test_ops_on_fake_and_meta_tensors_give_shapes() -> None:
    def check(x: torch.Tensor) -> None:
        assert (OPS.stats(x).shape, OPS.stats(x).dtype) == ((192,), torch.uint8)
        assert OPS.stats_list([x, x]).shape == (2, 192)
        assert (OPS.checksum(x).shape, OPS.checksum(x).dtype) == ((), torch.int64)
        found = OPS.found_nonfinite([x])
        assert (found.shape, found.dtype) == ((), torch.float32)
        assert OPS.stats(x).device == x.device

    check(torch.empty(5, device="meta"))
    with FakeTensorMode():
        check(torch.empty(5))


def test_ops_trace() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    graph = make_fx(lambda x: OPS.stats(x * 2), tracing_mode="fake")(X)
    assert "torch.ops.fastcheck.stats.default" in graph.code
    assert_same(graph(X).cpu().numpy().tobytes(), kernel(X * 2))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, from within Inductor
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_ops_compile_without_a_graph_break(compiler: str) -> None:
    if compiler == "inductor" and DEVICE not in ("cpu", "cuda"):
        pytest.skip("Inductor does not know this device")

    def both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x * 2
        return y + 1, OPS.stats(y)

    y, record = torch.compile(both, backend=compiler, fullgraph=True)(X)
    assert torch.equal(y.nan_to_num(), (X * 2 + 1).nan_to_num())
    assert_same(record.cpu().numpy().tobytes(), kernel(X * 2))
