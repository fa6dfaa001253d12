"""Names and contents of wheels, without compiling one; `make test-wheel` builds and tries them.

The pure-Python wheel takes a second, so it is built here, from the source distribution.
"""

from __future__ import annotations

import email
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch

from fastcheck.cli import doctor
from package import wheel_smoke
from support.paths import ROOT
from support.pythons import python_of
from support.records.reference import fields, record

TORCH = "".join(torch.__version__.split(".")[:2])

sys.path.insert(0, str(ROOT / "wheels"))
import label  # noqa: E402  (found by the line above)

pytest.importorskip("scikit_build_core")
import fitting  # noqa: E402  (needs packaging, which scikit-build-core brings)

# ---- labels --------------------------------------------------------------------------------------


def nvcc(folder: Path, says: str) -> str:
    script = folder / "nvcc"
    script.write_text(f"#!/bin/sh\necho '{says}'\n")
    script.chmod(0o755)
    return str(script)


@pytest.mark.parametrize(
    ("accelerator", "expected"),
    [
        (None, ""),
        ("", ""),
        ("cpu", f"+pt{TORCH}.cpu"),
        ("cuda", f"+pt{TORCH}.cu12"),
        ("generic", "+generic"),
    ],
)
def test_a_label_names_torch_and_the_accelerator(
    accelerator: str | None, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDACXX", nvcc(tmp_path, "Cuda compilation tools, release 12.8, V12.8.9"))
    assert label.label(accelerator) == expected


def test_nvcc_is_the_one_in_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDACXX", raising=False)
    nvcc(tmp_path, "release 14.1, V14.1.0")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert label.label("cuda") == f"+pt{TORCH}.cu14"
    assert label.label("cuda-any") == "+cu14"
    monkeypatch.setenv("PATH", "")
    with pytest.raises(RuntimeError, match="needs nvcc, and there is none in PATH"):
        label.label("cuda")


def test_what_nvcc_says_must_be_a_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDACXX", nvcc(tmp_path, "something else"))
    with pytest.raises(RuntimeError, match=r"expected a release number from .*something else"):
        label.label("cuda")


def test_an_unknown_accelerator() -> None:
    with pytest.raises(
        ValueError,
        match="is 'rocm'; expected one of cpu, cuda, cpu-any, cuda-any, generic, or unset",
    ):
        label.label("rocm")


def test_a_torch_to_build_against_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(RuntimeError, match="install torch first and build without isolation"):
        label.label("cpu")
    assert label.label("generic") == "+generic"
    assert label.label("cpu-any") == "+cpu"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("", "none: built from source"),
        ("generic", "+generic, for any torch and any accelerator: pure Python"),
        ("pt213.cpu", "+pt213.cpu, for the CPU"),
        ("pt213.cu13", "+pt213.cu13, for the CPU and CUDA 13"),
        ("cpu", "+cpu, for the CPU, for any torch; hooks in pure Python"),
        ("cu13", "+cu13, for the CPU and CUDA 13, for any torch; hooks in pure Python"),
    ],
)
def test_doctor_says_what_a_wheel_is_for(name: str, expected: str) -> None:
    assert doctor._wheel(name) == expected


# ---- which wheel `make demo` installs ------------------------------------------------------------


THIS_PYTHON = str(next(fitting.sys_tags()))


@pytest.mark.parametrize(
    ("name", "made", "fits"),
    [
        (f"fastcheck-0.1.0+pt213.cpu-{THIS_PYTHON}.whl", 100, True),
        (f"fastcheck-0.1.0+pt213.cpu-{THIS_PYTHON}.whl", 99, False),
        (f"fastcheck-0.2.0+pt213.cpu-{THIS_PYTHON}.whl", 100, False),
        (f"fastcheck-0.1.0+pt211.cpu-{THIS_PYTHON}.whl", 100, False),
        (f"fastcheck-0.1.0+pt213.cu13-{THIS_PYTHON}.whl", 100, False),
        ("fastcheck-0.1.0+generic-py3-none-any.whl", 100, False),
        ("fastcheck-0.1.0+pt213.cpu-cp27-cp27m-win32.whl", 100, False),
    ],
)
def test_a_wheel_fits_or_not(name: str, made: int, fits: bool, tmp_path: Path) -> None:
    wheel = tmp_path / name
    wheel.touch()
    os.utime(wheel, (made, made))
    assert fitting.fitting([wheel], "0.1.0+pt213.cpu", 100) == (wheel if fits else None)


def test_the_newest_wheel_is_taken(tmp_path: Path) -> None:
    wheels = [tmp_path / f"fastcheck-1+pt213.cpu-{n}-{THIS_PYTHON}.whl" for n in (1, 2)]
    for made, wheel in zip((300, 200), wheels):
        wheel.touch()
        os.utime(wheel, (made, made))
    assert fitting.fitting(wheels, "1+pt213.cpu", 0) == wheels[0]


def test_a_source_that_is_newer_than_a_wheel_counts(tmp_path: Path) -> None:
    for name in ("csrc/core/a.h", "python/fastcheck/b.py", "CMakeLists.txt", "pyproject.toml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "docs.md").touch()
    found = {path.name for path in fitting.sources(tmp_path)}
    assert found == {"a.h", "b.py", "CMakeLists.txt", "pyproject.toml"}


# ---- the source distribution, and a wheel from it ------------------------------------------------


def build(hook: str, source: Path, out: Path, accelerator: str) -> str:
    """The name of what a hook of the build backend makes, in the environment that is there."""
    code = f"from scikit_build_core import build; print(build.{hook}({str(out)!r}))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=source,
        env={**os.environ, "FASTCHECK_ACCELERATOR": accelerator},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution, made where a wheel would get a label."""
    folder = tmp_path_factory.mktemp("sdist")
    name = build("build_sdist", ROOT, folder, "generic")
    version = (ROOT / "python/fastcheck/_version.py").read_text().split('"')[-2]
    assert name == f"fastcheck-{version}.tar.gz"
    with tarfile.open(folder / name) as archive:
        archive.extractall(folder)  # of our own making
    return folder / name[: -len(".tar.gz")]


@pytest.fixture(scope="module")
def wheel(unpacked: Path, tmp_path_factory: pytest.TempPathFactory) -> wheel_smoke.Wheel:
    folder = tmp_path_factory.mktemp("wheel")
    return wheel_smoke.Wheel(folder / build("build_wheel", unpacked, folder, "generic"))


def test_the_source_distribution_is_what_git_holds(unpacked: Path) -> None:
    """All of it but CI's script, and nothing that lies about beside it."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    expected = {name for name in listed if not name.startswith(".ci/") and (ROOT / name).exists()}
    got = {str(path.relative_to(unpacked)) for path in unpacked.rglob("*") if path.is_file()}
    assert got == {*expected, "PKG-INFO"}
    differ = [n for n in sorted(expected) if (unpacked / n).read_bytes() != (ROOT / n).read_bytes()]
    assert differ == []


def test_the_generic_wheel_is_for_any_python_and_platform(wheel: wheel_smoke.Wheel) -> None:
    assert wheel.path.name.endswith("+generic-py3-none-any.whl")
    wheel_smoke.it_holds_its_own_libraries_and_no_others(wheel)
    wheel_smoke.it_holds_these_sources(wheel)


def test_sdist_and_wheel_have_every_licence(unpacked: Path, wheel: wheel_smoke.Wheel) -> None:
    with zipfile.ZipFile(wheel.path) as archive:
        names = archive.namelist()
    for licence in ("LICENSE", "python/fastcheck/report/page/assets/LICENSE-uPlot"):
        assert (unpacked / licence).exists()
        assert any(name.endswith(f".dist-info/licenses/{licence}") for name in names)


def test_the_generic_wheel_says_what_it_is(wheel: wheel_smoke.Wheel, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel.path) as archive:
        archive.extractall(tmp_path)
    # -S: an editable install would put its own fastcheck in front.
    path = os.pathsep.join([str(tmp_path), *(p for p in sys.path if p.endswith("packages"))])
    code = """
import fastcheck, torch
from fastcheck.extension import extension, status
from fastcheck.kernels import status as kernels
print(fastcheck.__file__)
print(kernels.label, status.text, status.is_broken, fastcheck.stats(torch.ones(3)).numel)
try:
    extension.record()
except fastcheck.ExtensionError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-S", "-W", "error", "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    where, said, problem = done.stdout.splitlines()
    assert where == str(tmp_path / "fastcheck" / "__init__.py")
    assert said == "generic pure Python: portable backend False 3"
    assert problem.startswith("this is fastcheck's generic wheel, which has no compiled extension")


# ---- metadata, and the conda recipe --------------------------------------------------------------


def names(requirements: list[str]) -> dict[str, str]:
    """Each requirement's package, with its lowest version."""
    return {name: least for name, _, least in (each.partition(">=") for each in requirements)}


def test_the_conda_recipe_agrees_with_the_project() -> None:
    yaml = pytest.importorskip("yaml")
    tomllib = pytest.importorskip("tomllib")
    recipe = yaml.safe_load((ROOT / "wheels" / "recipe.yaml").read_text())
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project, build_system = settings["project"], settings["build-system"]
    assert recipe["context"]["version"] == label.version()
    assert recipe["package"]["name"] == project["name"]
    assert recipe["about"]["summary"] == project["description"]
    assert recipe["about"]["license"] == project["license"]
    assert recipe["about"]["license_file"] == project["license-files"]
    needed = {
        part: [one.replace(" ", "") for one in recipe["requirements"][part]]
        for part in recipe["requirements"]
    }
    host = names(needed["host"])
    assert host["python"] == project["requires-python"].removeprefix(">=")
    assert host["pytorch"] == names(project["dependencies"])["torch"]
    for name, least in names(build_system["requires"]).items():
        assert host[name] == least
    text = (ROOT / "requirements-build.txt").read_text()
    for line in (line for line in text.splitlines() if not line.startswith("#")):
        assert line in [*needed["build"], *needed["host"]]
    assert "numpy" in needed["run"] and any("pytorch" in one for one in needed["run"])


#: Reads all Python files of a folder, as an import would.
READ_CODE = """
import pathlib, sys
for path in pathlib.Path(sys.argv[1]).rglob("*.py"):
    compile(path.read_bytes(), str(path), "exec")
"""


def test_the_lowest_python_reads_all_files() -> None:
    """Ruff does not report an assignment without parentheses in an index, new in Python 3.10."""
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    python = python_of(project["requires-python"].removeprefix(">="))
    command = [python, "-I", "-c", READ_CODE, str(ROOT / "python")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_wheel_names_its_authors_and_says_what_it_is(wheel: wheel_smoke.Wheel) -> None:
    with zipfile.ZipFile(wheel.path) as archive:
        name = next(name for name in archive.namelist() if name.endswith("METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
    assert metadata["Author"] == "fastcheck contributors"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert "nan" in metadata["Keywords"] and "Typing :: Typed" in metadata.get_all("Classifier", [])


# ---- the smoke test's own constants --------------------------------------------------------------


@pytest.mark.parametrize("dtype", wheel_smoke.CHECKSUMS)
def test_the_smoke_test_knows_the_references_checksums(dtype: str) -> None:
    x = wheel_smoke.sample(dtype)
    assert fields(record(x))["checksum"] == wheel_smoke.CHECKSUMS[dtype]
    assert x.double().tolist() == wheel_smoke.sample("float64").tolist()
