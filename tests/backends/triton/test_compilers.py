"""The machine code of the Triton kernels for NVIDIA and AMD, without a GPU: no atomics, no float64,
no wide loads of 64-bit integers, and no register spilled.
"""

from __future__ import annotations

import itertools
import os
import re
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("there is nothing to compile in the interpreter", allow_module_level=True)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fastcheck.backends.triton import launch
from support.devices.triton_sources import KERNELS, source
from support.sampling import sample

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
#: As target_of() has it for a GPU.
GPU = launch.Target(programs=1000, lanes=256, options={"num_warps": 4})
DTYPES = ("float32", "bfloat16", "float16", "int8", "uint32", "int64", "bool")


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))


def compiled(name: str, dtype: str, target: str) -> dict[str, str]:
    kernel, types, constants, aligned = source(name, dtype, GPU)
    names = kernel.arg_names
    made = triton.compile(
        ASTSource(
            fn=kernel,
            signature={n: types.get(n, "constexpr") for n in names},
            constexprs={(names.index(n),): value for n, value in constants.items()},
            attrs={(names.index(n),): [["tt.divisibility", 16]] for n in aligned},
        ),
        target=TARGETS[target],
        options=dict(GPU.options),
    )
    return dict(made.asm)


def check_portable(ttir: str) -> None:
    """Only what every target has."""
    assert "tt.store" in ttir and "tt.atomic" not in ttir
    assert "f64" not in ttir and not re.search(r"tensor<[0-9x]*xi64>", ttir)


@pytest.mark.parametrize("target", sample(sorted(TARGETS), 1))
def test_targets(target: str) -> None:
    binary = "hsaco" if target.startswith("gfx") else "cubin"
    for name in KERNELS:
        asm = compiled(name, "float32", target)
        check_portable(asm["ttir"])
        assert len(asm[binary]) > 1000


@pytest.mark.parametrize(
    ("dtype", "name"), sample(itertools.product(DTYPES, ("whole", "part_list")), 2)
)
def test_dtypes(dtype: str, name: str, tmp_path: Path) -> None:
    asm = compiled(name, dtype, "sm_90")
    check_portable(asm["ttir"])
    ptx = asm["ptx"]
    # Flushing would lose nothing here (no operand is subnormal), but it was not requested.
    assert ".ftz" not in ptx and ".f64" not in ptx and "atom." not in ptx
    assembler = next(Path(triton.__file__).parent.glob("backends/nvidia/bin/ptxas"))
    (tmp_path / "kernel.ptx").write_text(ptx)
    said = subprocess.run(
        [assembler, "-v", "-arch=sm_90a", tmp_path / "kernel.ptx", "-o", tmp_path / "kernel.cubin"],
        capture_output=True,
        text=True,
        check=True,
    ).stderr
    assert re.search(r"\b0 bytes spill stores, 0 bytes spill loads", said), said
