"""Tries an installed wheel from outside the source tree: ``make test-wheel``.

    cd /elsewhere && ENVIRONMENT/bin/python -I .../package/wheel_smoke.py dist/fastcheck-...whl

The wheel is the one that was installed in ENVIRONMENT, which holds torch and numpy besides. Needs
no pytest; exit code 1 when anything is not as it should be.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
import re
import struct
import subprocess
import sys
import tempfile
import traceback
import warnings
import zipfile
from pathlib import Path
from typing import Any, Callable

import torch
from torch import nn

import fastcheck

ROOT = Path(__file__).resolve().parents[2]

#: Of tests/support/records/reference.py, to which tests/package/test_wheels.py holds them.
CHECKSUMS = {
    "float32": 0x09F5F665C9D0A55C,
    "float16": 0x1023ED81C85C2A93,
    "bfloat16": 0xDA53163A813356E7,
    "float64": 0xF8FEC15163A7AE32,
    "int8": 0xFAB387ECF16F2463,
}
COUNT = 4999

# 5 * 2^13 is the last that float16 holds.
FIRST_OVERFLOW = 14


class Wheel:
    """What a wheel's file name and its contents say."""

    def __init__(self, path: Path) -> None:
        self.path = path
        _, self.version, _, _, self.platform = path.name[: -len(".whl")].split("-")
        self.label = self.version.partition("+")[2]
        self.torch, _, self.accelerator = self.label.rpartition(".")
        self.is_generic = self.label == "generic"
        self.is_for_any_torch = not self.torch
        self.has_cuda = self.accelerator.startswith("cu")
        with zipfile.ZipFile(path) as archive:
            self.files = archive.namelist()

    @property
    def libraries(self) -> list[str]:
        return [name for name in self.files if re.search(r"\.so(\.|$)", name)]


def sample(dtype: str) -> torch.Tensor:
    """COUNT elements, each a number that every one of these dtypes holds."""
    return (torch.arange(COUNT) % 251 - 125).to(getattr(torch, dtype))


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-I", *arguments], capture_output=True, text=True, check=False
    )


def doctor() -> Any:
    done = command("-m", "fastcheck", "doctor", "--json")
    assert done.returncode == 0, done
    return json.loads(done.stdout)


# ---- what was installed --------------------------------------------------------------------------


def it_is_what_is_imported(wheel: Wheel) -> None:
    where = Path(fastcheck.__file__).resolve()
    assert Path(sys.prefix).resolve() in where.parents, where
    assert ROOT not in where.parents and ROOT not in [Path.cwd(), *Path.cwd().parents], where


def it_holds_these_sources(wheel: Wheel) -> None:
    sources = ROOT / "python"
    made = (".pyc", ".so", ".in", "_build_info.py")
    paths = [path for path in sources.rglob("*") if path.is_file()]
    expected = {str(p.relative_to(sources)) for p in paths if not p.name.endswith(made)}
    built = {"fastcheck/_build_info.py", *wheel.libraries}
    files = {name for name in wheel.files if not name.endswith("/")}
    got = {
        name
        for name in files
        if name.startswith(("fastcheck/", "fastcheck_lightning", "fastcheck_pytest"))
    } - built
    assert got == expected, got ^ expected
    with zipfile.ZipFile(wheel.path) as archive:
        stale = [n for n in sorted(got) if archive.read(n) != (sources / n).read_bytes()]
    assert not stale, f"{stale} differ from these sources; `make wheel` builds the wheel anew"


def its_version_names_torch_and_the_accelerator(wheel: Wheel) -> None:
    assert importlib.metadata.version("fastcheck") == wheel.version
    assert wheel.version.partition("+")[0] == fastcheck.__version__
    if not wheel.is_for_any_torch:
        assert wheel.torch == "pt" + "".join(torch.__version__.split("+")[0].split(".")[:2])
    assert wheel.is_generic or re.fullmatch(r"cpu|cu\d+", wheel.accelerator), wheel.label


def it_holds_its_own_libraries_and_no_others(wheel: Wheel) -> None:
    if wheel.is_generic:
        assert wheel.path.name.endswith("-py3-none-any.whl") and wheel.libraries == []
        return
    hooks = set() if wheel.is_for_any_torch else {"fastcheck/_C"}
    assert {re.sub(r"\..*", "", name) for name in wheel.libraries} == {"fastcheck/_kernels"} | hooks
    assert ("-cp39-abi3-" in wheel.path.name) == wheel.is_for_any_torch, wheel.path.name
    assert re.match(r"manylinux_2_\d+_", wheel.platform), wheel.platform


def doctor_names_the_accelerator(wheel: Wheel) -> None:
    found = doctor()
    versions = found["versions"]
    kernels = {row["name"] for row in found["cpu_kernels"]}
    table = {row["name"]: row["reason"] for row in found["backends"]}
    assert versions["wheel"].startswith(f"+{wheel.label}, for "), versions
    if wheel.is_generic:
        assert "any accelerator" in versions["wheel"], versions
        assert versions["extension"] == "pure Python: portable backend", versions
        assert kernels == set()
        return
    assert "CPU" in versions["wheel"] and ("CUDA" in versions["wheel"]) == wheel.has_cuda, versions
    hooks = "hooks in pure Python" if wheel.is_for_any_torch else r"for torch [\w.+]+"
    assert re.fullmatch(hooks, versions["extension"]), versions
    assert table["cpu"] == "compiled kernels", table
    if platform.machine() == "x86_64":
        assert kernels >= {"avx512_vbmi", "avx512_vnni", "avx512", "avx2", "scalar"}, kernels
    assert table["cuda"].startswith("built; ") == wheel.has_cuda, table


def gpu_code(library: bytes) -> tuple[set[str], set[str]]:
    """The compute capabilities of the machine code and of the PTX in a library's fat binaries.

    A fat binary is a header (magic, version, size of the header and of what follows) and entries
    that begin with their kind, version, size of their header and of their payload; capability at
    byte 28. Not documented by NVIDIA; what `cuobjdump --list-elf --list-ptx` lists, which a toolkit
    need not have.
    """
    found: dict[int, set[str]] = {1: set(), 2: set()}  # PTX, machine code
    magic_version_header = struct.pack("<IHH", 0xBA55ED50, 1, 16)
    for start in re.finditer(re.escape(magic_version_header), library):
        (bytes_left,) = struct.unpack_from("<Q", library, start.end())
        entry = start.start() + 16
        while bytes_left > 0:
            kind, _, header_bytes, payload_bytes = struct.unpack_from("<HHIQ", library, entry)
            found[kind].add(str(struct.unpack_from("<I", library, entry + 28)[0]))
            entry += header_bytes + payload_bytes
            bytes_left -= header_bytes + payload_bytes
    return found[2], found[1]


def its_gpu_code_is_what_doctor_says(wheel: Wheel) -> None:
    said = doctor()["versions"]["cuda"]
    with zipfile.ZipFile(wheel.path) as archive:
        libraries = [archive.read(name) for name in wheel.libraries]
    machine, ptx = gpu_code(b"".join(libraries))
    if not wheel.has_cuda:
        assert (said, machine, ptx) == ("not built", set(), set()), (said, machine, ptx)
        return
    found = re.fullmatch(r"built \(cuda(\d+)\.\d+ for ([\w+ ]+)\)", said)
    assert found is not None, said
    assert f"cu{found[1]}" == wheel.accelerator, said
    archs = re.findall(r"(\d+)[af]?([+]PTX)?", found[2])
    assert machine == {arch for arch, _ in archs}, (machine, said)
    assert ptx == {arch for arch, extra in archs if extra}, (ptx, said)


# ---- what it does --------------------------------------------------------------------------------


def it_reads_what_the_reference_reads(wheel: Wheel) -> None:
    from fastcheck.backends import table

    expected = "portable" if wheel.is_generic else "cpu"
    assert table.backend_for(torch.device("cpu")).name == expected
    got = {dtype: fastcheck.checksum(sample(dtype)) for dtype in CHECKSUMS}
    assert got == CHECKSUMS, got
    x = sample("float32")
    x[7], x[9], x[11] = math.nan, math.inf, -math.inf
    s = fastcheck.stats(x)
    assert (s.nan_count, s.posinf_count, s.neginf_count) == (1, 1, 1), s
    assert (s.min, s.max, s.zero_count) == (-125.0, 125.0, int((x == 0).sum())), s


class Grow(nn.Module):
    """Doubles what it returns at each call, in float16."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.half() * self.factor
        self.factor *= 2.0
        return y


def train(watched: bool) -> list[float]:
    """The losses until 5 * 2^step no longer fits float16, or until it was stopped."""
    model = nn.Sequential(nn.Linear(5, 3, bias=False), Grow())
    with torch.no_grad():
        model[0].weight.fill_(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    losses: list[float] = []
    if watched:
        fastcheck.install(model, training=fastcheck.Training(optimizer=optimizer), overflow_nums=1)
    for _ in range(FIRST_OVERFLOW + 2):
        optimizer.zero_grad()
        try:
            loss = model(torch.ones(2, 5)).float().mean()
            loss.backward()
            optimizer.step()
        except fastcheck.OverflowDetected as stop:
            assert stop.step == FIRST_OVERFLOW == len(losses), stop
            culprit = stop.culprit
            assert (culprit.site.module, culprit.site.role) == ("1", "output"), stop
            assert int(culprit.record["posinf_count"]) == 6, stop
            report = str(stop)
            for part in ("6 +Inf among 6", "origin", "1 (Grow)", "float16", f"step {stop.step}"):
                assert part in report, (part, report)
            return losses
        losses.append(loss.item())
    assert not watched, "training went on past the overflow"
    return losses


def a_training_that_overflows_is_stopped(wheel: Wheel) -> None:
    watched, plain = train(True), train(False)
    assert len(watched) == FIRST_OVERFLOW
    assert watched == plain[:FIRST_OVERFLOW] and math.isinf(plain[FIRST_OVERFLOW])


def op_level_names_the_operator(wheel: Wheel) -> None:
    """Its observer is C++: a wheel without it raises before anything is observed."""
    model = nn.Linear(2, 1)
    try:
        monitor = fastcheck.install(model, level="op")
    except fastcheck.ExtensionError as error:
        expected = "generic wheel" if wheel.is_generic else "wheel of kernels for any torch"
        assert wheel.is_for_any_torch and expected in str(error), error
        return
    assert not wheel.is_for_any_torch
    try:
        torch.sqrt(model(torch.ones(1, 2)) * 0.0 - 1.0).sum().backward()
        monitor.flush()
    except fastcheck.OverflowDetected as stop:
        assert "aten.sqrt" in str(stop), stop
    else:
        raise AssertionError("the square root of -1 passed")
    finally:
        monitor.remove()


def the_demo_tells_its_story(wheel: Wheel) -> None:
    script = Path(sys.executable).with_name("fastcheck")
    done = subprocess.run([str(script), "demo"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout[-3000:], done.stderr[-3000:])
    assert "stopped by fastcheck" in done.stdout and "what      1 +Inf" in done.stdout, done.stdout


def beside_another_torch_it_says_so_and_goes_on(wheel: Wheel) -> None:
    """Torch as it is, under the name of a release that the wheel was not built for."""
    code = f"""
import torch
torch.__version__ = "2.99.1+cpu"
import fastcheck, fastcheck.backends.table
assert fastcheck.checksum(torch.ones(3)) == {fastcheck.checksum(torch.ones(3))}
print(fastcheck.backends.table.backend_for(torch.device("cpu")).name)
"""
    done = command("-c", code)
    reads = "portable" if wheel.is_generic else "cpu"
    assert (done.returncode, done.stdout) == (0, f"{reads}\n"), done
    if wheel.is_for_any_torch:
        assert done.stderr == "", done
        return
    assert "FastcheckWarning" in done.stderr, done
    assert "and this is torch 2.99.1+cpu; install fastcheck's wheel for torch 2.99" in done.stderr
    assert "undefined symbol" not in done.stderr, done


CHECKS: tuple[Callable[[Wheel], None], ...] = (
    it_is_what_is_imported,
    it_holds_these_sources,
    its_version_names_torch_and_the_accelerator,
    it_holds_its_own_libraries_and_no_others,
    doctor_names_the_accelerator,
    its_gpu_code_is_what_doctor_says,
    it_reads_what_the_reference_reads,
    a_training_that_overflows_is_stopped,
    op_level_names_the_operator,
    the_demo_tells_its_story,
    beside_another_torch_it_says_so_and_goes_on,
)


def main(path: str) -> int:
    warnings.simplefilter("error")
    wheel = Wheel(Path(path).resolve())
    print(wheel.path.name)
    failed = 0
    with tempfile.TemporaryDirectory() as scratch:  # a stop writes its log where it runs
        os.chdir(scratch)
        for check in CHECKS:
            try:
                check(wheel)
            except Exception:
                failed += 1
                print(f"FAILED {check.__name__}")
                traceback.print_exc(file=sys.stdout)
            else:
                print(f"ok     {check.__name__}")
        os.chdir(os.sep)
    print(f"{len(CHECKS) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
