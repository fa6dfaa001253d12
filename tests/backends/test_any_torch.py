"""The compiled kernels without the hooks that are compiled for one release of torch."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

import fastcheck
from fastcheck import _kernels
from fastcheck.backends import backend
from fastcheck.backends.cpu import cpu_backend
from fastcheck.backends.portable.exponents import count_exponents
from support.helpers import SIZES, even, expected, kinds, tensor_of
from support.processes import run_code
from support.pythons import python_of
from support.records.reference import DEPTHS, DTYPES, RECORD_BYTES, fields, pattern

NATIVE = cpu_backend(_kernels)
ALONE = {"FASTCHECK_NO_BINDING": "1"}


def values(tensors: list[torch.Tensor], depth: int = 3, *, logical: bool = False) -> list[bytes]:
    slots = torch.zeros((len(tensors), RECORD_BYTES), dtype=torch.uint8)
    NATIVE.observe_list(tensors, slots, 0, depth, logical=logical)
    return [row.numpy().tobytes() for row in slots]


def by_extension(tensors: list[torch.Tensor], **options: Any) -> list[bytes]:
    return [record.tobytes() for record in fastcheck.stats(tensors, **options).numpy()]


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_records_equal_those_of_the_extension(dtype: str) -> None:
    tensors = [
        tensor_of(pattern(kind, dtype, even(size, dtype), size), dtype)
        for kind in kinds(dtype)
        for size in SIZES
    ]
    for depth, level in DEPTHS.items():
        assert values(tensors, level) == by_extension(tensors, record=depth)


LAYOUTS = {
    "transposed": lambda x: x.reshape(30, 40).t(),
    "every second": lambda x: x[::2],
    "expanded": lambda x: x[:7, None].expand(7, 5),
    "channels last": lambda x: x.reshape(2, 5, 12, 10).to(memory_format=torch.channels_last),
    "a row": lambda x: x.reshape(30, 40)[3],
    "a column": lambda x: x.reshape(30, 40)[:, 3],
    "empty": lambda x: x[:0].reshape(0, 3),
    "empty, transposed": lambda x: x[:0].reshape(0, 3).t(),
    "a scalar": lambda x: x[5],
    "sizes of one": lambda x: x.reshape(1, 1200, 1).transpose(0, 2)[:, 7:],
    "one element of any stride": lambda x: x.as_strided((1, 1), (77, 3)),
    "off by an element": lambda x: x[1:],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("order", ["storage", "logical"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_layouts(layout: str, order: str, dtype: torch.dtype) -> None:
    x = LAYOUTS[layout](torch.arange(1200).sub(600).to(dtype))
    assert values([x], logical=order == "logical") == by_extension([x], order=order)


def test_threads_of_its_own_give_the_same_bits() -> None:
    x = torch.randn(3_000_001)
    want = by_extension([x])[0]
    out = (ctypes.c_char * RECORD_BYTES)()
    for threads in (1, 2, 5, 64):
        listed, _ = backend.arguments_of([x])
        assert _kernels.records(listed, 3, False, threads, ctypes.addressof(out)) == 0
        assert out.raw == want


def test_lazy_views_subclasses_and_gradients() -> None:
    class Sub(torch.Tensor):
        pass

    z = torch.tensor([1 + 2j, 3 - 4j], requires_grad=True)
    lazy = [z.conj(), z.conj().imag, torch.ones(3).as_subclass(Sub), torch.ones(2).neg()]
    assert values(lazy) == by_extension(lazy)


def test_freed_memory_is_refused() -> None:
    freed, smaller = torch.ones(1000), torch.ones(1000)[990:]
    every_second = freed[::2]
    freed.untyped_storage().resize_(0)
    smaller.untyped_storage().resize_(3990)
    for x in (freed, smaller, every_second):
        with pytest.raises(ValueError, match="expected a tensor whose storage holds all its"):
            values([x])
    assert len(values([freed[:0]])) == 1


def test_found_nonfinite() -> None:
    healthy = [torch.ones(3), torch.arange(4), torch.empty(0)]
    assert NATIVE.found_nonfinite(healthy).item() == 0.0
    assert NATIVE.found_nonfinite([]).item() == 0.0
    for bad in (float("nan"), float("-inf")):
        found = NATIVE.found_nonfinite([*healthy, torch.tensor([1.0, bad])])
        assert found.item() == 1.0 and found.dtype == torch.float32 and found.dim() == 0


def test_exponents() -> None:
    x = torch.randn(40, 50, dtype=torch.bfloat16).t()
    assert NATIVE.exponents is not None
    for logical in (False, True):
        assert torch.equal(NATIVE.exponents(x, logical), count_exponents(x, logical))


@pytest.mark.parametrize(
    ("tensors", "error", "text"),
    [
        ((), TypeError, "expected a list of tensors' tuples"),
        ([3], TypeError, r"expected a tuple \(pointer, dtype code, sizes, strides\), got another"),
        ([(0, 1, ())], TypeError, "got a tuple of 3"),
        ([(0, 17, (), ())], ValueError, "expected a dtype's code from 0 to 16, got 17"),
        ([(0, 1, (2,), ())], ValueError, "got 1 sizes and 0 strides"),
        ([(0, 1, (1,) * 65, (1,) * 65)], ValueError, "at most 64, got 65 sizes"),
        ([(0, 1, (-1,), (1,))], ValueError, "expected a tuple of sizes of integers from 0, got -1"),
        ([(0, 1, (1,), (-1,))], ValueError, "expected a tuple of strides of integers from 0"),
        ([(0, 1, [1], (1,))], TypeError, "expected a tuple of sizes, got another type"),
        ([("x", 1, (1,), (1,))], TypeError, "int"),
        ([(1 << 70, 1, (1,), (1,))], OverflowError, "int"),
    ],
)
def test_arguments_that_are_no_tensors(tensors: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        _kernels.records(tensors, 3, False, 1, 0)


def test_a_depth_that_there_is_not() -> None:
    with pytest.raises(ValueError, match=r"expected depth 1 \(health\), 2 .* got 4"):
        _kernels.records([], 4, False, 1, 0)


def test_without_the_hooks_the_kernels_read() -> None:
    code = """
import torch, fastcheck
from fastcheck.backends.table import backend_for
from fastcheck.extension import extension, status
from fastcheck.utils.torch.seen_tensors import SeenTensors, make_seen
assert backend_for(torch.device("cpu")).name == "cpu"
assert status.module is None and isinstance(make_seen(), SeenTensors)
print(status.text)
x = torch.arange(5000).sub(2500).float()
print(fastcheck.checksum(x), fastcheck.stats([x, x.t()]).numpy()[1].tobytes().hex())
try:
    extension.op_observer()
except fastcheck.ExtensionError as error:
    print(error)
model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
fastcheck.install(model)
with torch.no_grad():
    model[0].weight.fill_(3e38)
try:
    model(torch.full((1, 2), 1e3))
except fastcheck.OverflowDetected as stop:
    print(stop.culprit.site.module, stop.step)
"""
    done = run_code(code, env=ALONE)
    assert (done.returncode, done.stderr) == (0, ""), done
    text, record, problem, culprit = done.stdout.splitlines()
    x = torch.arange(5000).sub(2500).float()
    assert text == "hooks in pure Python"
    assert record == f"{fastcheck.checksum(x)} {by_extension([x])[0].hex()}"
    assert problem == "the compiled hooks are switched off by FASTCHECK_NO_BINDING; unset it"
    assert culprit == "0 0"


def test_it_is_of_the_stable_abi_and_includes_no_torch() -> None:
    assert _kernels.__file__.endswith(".abi3.so")
    needed = Path(_kernels.__file__).read_bytes()
    assert b"libc10" not in needed and b"libtorch" not in needed and b"libpython" not in needed


def test_expected_is_what_the_reference_has() -> None:
    """The oracle beside both, once."""
    x = tensor_of(pattern("random", "float32", 9000, 1), "float32")
    want = fields(expected("random", "float32", 9000, 1))
    assert fields(values([x])[0]) == want


# ---- other Pythons, without torch ----------------------------------------------------------------

#: What the module is read by where there is no torch: a file's path and one argument.
ALONE_CODE = """
import array, importlib.machinery, importlib.util, struct, sys
loader = importlib.machinery.ExtensionFileLoader("_kernels", sys.argv[1])
kernels = importlib.util.module_from_spec(importlib.util.spec_from_loader("_kernels", loader))
loader.exec_module(kernels)
code = next(row[0] for row in kernels.dtype_table() if row[1] == "float32")
values = array.array("f", [float(i - 2500) for i in range(5000)] + [float("nan")])
out = array.array("B", bytes(192))
count = kernels.records(
    [(values.buffer_info()[0], code, (5001,), (1,))], 3, False, 2, out.buffer_info()[0]
)
print(sys.version_info[:2], count, out.tobytes().hex())
try:
    kernels.records([(0, 99, (), ())], 3, False, 1, 0)
except ValueError as error:
    print(error)
"""


@pytest.mark.parametrize("version", ["3.9", "3.10", "3.11", "3.12", "3.13", "3.14"])
def test_any_python(version: str) -> None:
    command = [python_of(version), "-c", ALONE_CODE, str(_kernels.__file__)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    x = torch.cat([torch.arange(5000).sub(2500).float(), torch.tensor([float("nan")])])
    first, error = done.stdout.splitlines()
    major, minor = version.split(".")
    assert first == f"({major}, {minor}) 1 {by_extension([x])[0].hex()}"
    assert error == "expected a dtype's code from 0 to 16, got 99"
