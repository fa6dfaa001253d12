"""The command line: help, usage, exit codes, and doctor."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import fastcheck
from fastcheck import extension as extension_module
from fastcheck import kernels
from fastcheck.cli import doctor, show
from fastcheck.cli.main import main
from fastcheck.utils.reading import why_missing
from support.processes import run_python
from support.programs import synthetic_logs
from support.programs.command_line import run, shown_json


@pytest.mark.parametrize(
    "arguments",
    [
        ["show"],
        ["show", "x", "--step", "many"],
        ["show", "x", "--no-such-option"],
        ["shwo", "x"],
        [],
    ],
)
def test_wrong_usage_is_exit_code_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    code, out, err = run(capsys, *arguments)
    assert code == 2 and "usage: fastcheck" in out + err


@pytest.mark.parametrize(
    "arguments",
    [
        ["show", "fastcheck_lgo"],
        ["report", "fastcheck_lgo"],
        ["export", "fastcheck_lgo", "a.csv"],
        ["top", "fastcheck_lgo", "--once"],
        ["compare", "fastcheck_lgo", "fastcheck_log"],
        ["compare", "fastcheck_log", "fastcheck_lgo/run-2"],
        ["collect", "fastcheck_lgo", "--out", "out"],
        ["fleet", "fastcheck_lgo"],
        ["verify", "fastcheck_lgo"],
        ["run", "fastcheck_lgo"],
        ["prove", "fastcheck_lgo.py:step"],
    ],
)
def test_a_misspelt_path_is_told_with_what_is_near(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    synthetic_logs.write(tmp_path / "fastcheck_log", 8, 10)
    if arguments[0] in ("collect", "fleet"):
        pytest.importorskip("pyarrow")
    code, _, err = run(capsys, *arguments)
    assert code == 2 and "'; did you mean 'fastcheck_log'?" in err
    assert all(word in err for word in ("expected: ", "got:      "))


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("", "the path is empty, as from a variable of the shell that is not set"),
        ("nothing/below", "there is no 'nothing'; beside it: file, here, link"),
        ("here/x", "there is no 'here/x'; beside it: a, b, c, d, e, ..."),
        ("here/a/x/", "there is no 'here/a/x'; beside it: nothing"),
        ("file/x", "file is a file"),
        ("link", "link is a link to gone, which is not there"),
    ],
)
def test_the_hint_for_a_path_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, hint: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in "abcdef":
        (tmp_path / "here" / name).mkdir(parents=True)
    (tmp_path / "file").touch()
    (tmp_path / ".hidden").touch()
    (tmp_path / "link").symlink_to("gone")
    assert why_missing(path) == hint


@pytest.mark.parametrize("arguments", [["--help"], ["show", "--help"], ["doctor", "--help"]])
def test_help_teaches_and_documents_exit_codes(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    code, out, _ = run(capsys, *arguments)
    assert code == 0 and "exit codes" in out
    assert all(len(line) <= 100 for line in out.splitlines())


def test_the_main_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "--help")
    for command in ("doctor", "show", "demo", "fastcheck.install(model, overflow_nums=1)"):
        assert command in out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--version")[:2] == (0, f"fastcheck {fastcheck.__version__}\n")


def test_demo_gets_the_rest_of_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    got: list[list[str]] = []
    module = types.ModuleType("fastcheck.cli.demo")
    monkeypatch.setattr(module, "main", got.append, raising=False)
    monkeypatch.setitem(sys.modules, "fastcheck.cli.demo", module)
    assert main(["demo", "--steps", "3", "--help"]) == 0
    assert got == [["--steps", "3", "--help"]]


def test_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: Any) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(show, "read_log", interrupted)
    assert main(["show", "x"]) == 130


# doctor


def test_doctor_prints_versions_backends_and_the_kernel(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FASTCHECK_CPU_ISA", raising=False)
    code, out, _ = run(capsys, "doctor")
    assert code == 0, out
    for label in ("fastcheck", "python", "torch", "numpy", "extension", "compiler", "cuda"):
        assert re.search(rf"(?m)^(versions)? +{label}  ", out), label
    for backend in ("cpu", "cuda", "npu", "mlu", "portable"):
        assert re.search(rf"(?m)^(backends)? +{backend} +(usable|no) ", out), backend
    assert re.search(r"scalar +(used|usable) ", out)
    assert re.search(r"\w+ is used: the fastest", out)


def test_doctor_says_what_of_the_tools_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if name == "rich":
            raise doctor.metadata.PackageNotFoundError(name)
        return "1.2"

    monkeypatch.setattr(doctor.metadata, "version", version)
    _, out, _ = run(capsys, "doctor")
    tools = "pyarrow 1.2, safetensors 1.2, not rich (pip install 'fastcheck[tools]')"
    assert re.search(rf"tools +{re.escape(tools)}\n", out)


def test_doctor_json(capsys: pytest.CaptureFixture[str]) -> None:
    document = shown_json(capsys, "doctor")
    assert document["versions"]["fastcheck"] == fastcheck.__version__
    usable = {entry["name"] for entry in document["cpu_kernels"] if entry["usable"]}
    assert "scalar" in usable and document["cpu_kernel"] in usable
    assert all(entry["reason"] for entry in document["cpu_kernels"] + document["backends"])


def test_doctor_says_which_variable_forced_a_kernel() -> None:
    shown = run_python("-m", "fastcheck", "doctor", env={"FASTCHECK_CPU_ISA": "scalar"})
    assert "scalar is used: FASTCHECK_CPU_ISA=scalar" in shown.stdout


def test_doctor_with_a_bad_kernel_name_has_exit_code_1() -> None:
    shown = run_python("-m", "fastcheck", "doctor", env={"FASTCHECK_CPU_ISA": "mmx"})
    assert shown.returncode == 1 and "mmx" in shown.stdout and "problems" in shown.stdout


def test_doctor_without_the_extension_says_what_reads_instead(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = "fastcheck's compiled extension is not installed; build it"
    monkeypatch.setattr(doctor, "kernel_status", kernels.KernelStatus(None, problem))
    monkeypatch.setattr(doctor, "status", extension_module.ExtensionStatus(None, problem))
    code, out, _ = run(capsys, "doctor")
    assert code == 0 and "problems" not in out
    assert "pure Python: portable backend" in out
    assert re.search(r"cpu +no +no compiled kernels", out)
    assert re.search(r"portable +usable +pure Python, for .*, the CPU too", out)


@pytest.mark.parametrize(
    "arguments, text",
    [
        (
            ["compare", "model.pt", "model.pt", "--loss-drift", "-1"],
            "loss_drift= must be 0 or more",
        ),
        (["compare", "model.pt", ""], "is empty, as from a variable of the shell"),
        (["compare", "junk.pt", "model.pt"], "junk.pt: not a whole file of torch's"),
        (["compare", "newer.json", "newer.json"], "this environment is of another format"),
        (["fleet", ".", "--lag", "-1"], "--lag is negative"),
        (["prove", "no_such_module:step"], "a module that can be imported"),
        (["shwo", "x"], "; did you mean 'show'"),
        (
            ["compare", "a", "b", "--exakt"],
            "fastcheck compare: error: unrecognized arguments: --ex",
        ),
        (["compare", "a", "b", "--exakt"], "; did you mean '--exact'"),
        (["top", "a", "--sort", "headrom"], "; did you mean 'headroom'"),
        (["compare", "a", "b", "exact"], "unrecognized arguments: exact\n"),
        (["verify", "missing.pt"], "there is no checkpoint here"),
        (["verify", "model.pt"], "the checkpoint has no seal"),
    ],
)
def test_what_cannot_be_used_is_exit_code_2_and_says_why(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    text: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"a": torch.ones(3)}, "model.pt")
    Path("newer.json").write_text('{"fastcheck": "environment", "format": 2}')
    Path("junk.pt").write_bytes(bytes(range(149, 255)))
    code, out, err = run(capsys, *arguments)
    assert code == 2 and text in err, out + err


def test_no_threads_are_wrong_usage_of_the_demo(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        run(capsys, "demo", "--threads", "0")
    assert "argument --threads: must be 1 or more, got 0" in capsys.readouterr().err


def test_a_module_that_a_program_lacks_is_an_error_of_the_program(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("proved_program.py").write_text("import no_such_module\n")
    code, _, err = run(capsys, "prove", "proved_program:step")
    assert code == 2 and "ModuleNotFoundError: No module named 'no_such_module'" in err
    assert err.endswith("nothing is proved: the program raised this exception\n")
