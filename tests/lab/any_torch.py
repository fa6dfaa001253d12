"""fastcheck's kernels beside the torch that is installed; tests/lab/any_torch.sh runs it.

    python any_torch.py wheel|built

``wheel``: the wheel of the kernels alone, without the compiled hooks. ``built``: both modules, for
the records to compare with. Prints one line: the versions, and a digest of records of all dtypes
and layouts and of a training run's, which every torch has to give. Exit code 1 where something else
was read by than the kernels.
"""

from __future__ import annotations

import hashlib
import platform
import sys
import warnings
from pathlib import Path

import numpy as np
import torch
from torch import nn

import fastcheck
from fastcheck import extension, kernels
from fastcheck.backends import table

DTYPES = (
    *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
    *("complex64", "complex128", "int8", "int16", "int32", "int64", "uint8", "bool"),
)


def tensors() -> list[torch.Tensor]:
    """The same bits with every torch; with NaN, infinities and subnormals among them."""
    found = []
    state = np.arange(1, 60_001, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    raw = torch.from_numpy((state ^ (state >> np.uint64(29))).view(np.uint8))
    for name in DTYPES:
        dtype = getattr(torch, name)
        flat = raw % 2 == 1 if dtype is torch.bool else raw.view(dtype)
        found += [flat, flat[1:20_000], flat[:6_000].reshape(60, 100).t(), flat[:9_999:3]]
    return found


def read() -> list[bytes]:
    assert table.backend_for(torch.device("cpu")).name == "cpu", "the kernels are not in use"
    return [fastcheck.stats(x, record="full").record.tobytes() for x in tensors()]


class Faulty(nn.Module):
    """Its second step divides zero by zero."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * 0 / (x * 0) if self.calls == 2 else x


def train() -> list[bytes]:
    """The records of a run that is stopped at its NaN, of exact sums."""
    model = nn.Sequential(nn.Linear(4, 4), Faulty(), nn.Linear(4, 2))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_((torch.arange(p.numel()) % 3 - 1).reshape(p.shape))
    monitor = fastcheck.install(model, record="full")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, foreach=False)
    x = (torch.arange(8) % 4).float().reshape(2, 4)
    try:
        for _ in range(3):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
    except fastcheck.OverflowDetected as stop:
        site = stop.culprit.site
        assert (site.module, site.role, stop.culprit.step) == ("1", "output", 1), stop.culprit
    else:
        raise AssertionError("the NaN did not stop the run")
    records = monitor.records()
    # A NaN's sign and payload, which are in the checksum, are the processor's choice.
    records["checksum"][records["nan_count"] > 0] = 0
    return [record.tobytes() for record in records]


def check_modules(kind: str) -> None:
    """The kernels are there, and the compiled hooks where they are expected."""
    assert kernels.status.module is not None, kernels.status.problem
    assert (extension.status.module is None) == (kind == "wheel"), extension.status.text
    place = Path(kernels.status.module.__file__)
    assert Path(sys.prefix) in place.parents, place


def digest(records: list[bytes]) -> str:
    assert records
    return hashlib.sha256(b"".join(records)).hexdigest()[:16]


def main() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", fastcheck.FastcheckWarning)
        check_modules(sys.argv[1])
        values, run = digest(read()), digest(train())
    print(f"torch {torch.__version__}, Python {platform.python_version()}: {values}-{run}")


if __name__ == "__main__":
    main()
