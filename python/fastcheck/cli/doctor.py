"""``fastcheck doctor``: lists installed versions, kernels and devices, and why some can't run. With
``--device`` it checks a device.
"""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from importlib import metadata
from typing import TYPE_CHECKING, Any

from fastcheck._version import __version__
from fastcheck.errors import first_line
from fastcheck.extension import status
from fastcheck.kernels import status as kernel_status
from fastcheck.utils.text.layout import Part, Section, Table, paint, wants_color, wrap
from fastcheck.utils.text.numbers import counted

from .console import print_json, show_sections

if TYPE_CHECKING:
    from fastcheck.selftest import CheckResult

_WIDTH = 88
_ISA_VARIABLE = "FASTCHECK_CPU_ISA"
_TOOLS = ("pyarrow", "rich", "safetensors")
_FOR_DEVICES = ("triton", "triton-ascend", "torch_npu", "torch_mlu")

HELP = "what is installed here, which kernels are used, and whether a device passes"

DESCRIPTION = """\
Prints versions, what the installed wheel is for, the backends that are built and usable, and the
CPU kernels: which of them this machine can run, which is used, and why. Paste it into a bug
report: it holds no path and no name of host or user.

With --device, also reads difficult tensors on the device and compares their records with those of
the CPU, looks for waits of the host, and stops a small training run. What can't be found out on a
device is "not checkable here", with the reason: that is no failure."""

EPILOG = f"""\
environment:
  {_ISA_VARIABLE}=NAME                 force one CPU kernel (all give the same bits):
                                         avx512_vbmi, avx512_vnni, avx512, avx2, scalar;
                                         on AArch64 neon, scalar
  FASTCHECK_NO_EXTENSION=1               pure Python, as if nothing compiled were installed
  FASTCHECK_NO_BINDING=1                 compiled kernels, with hooks in pure Python
  FASTCHECK_TRITON=auto|on|off           Triton's kernels: devices without a kernel of their own,
                                         CUDA too (to cross-check), none
  NO_COLOR=1                             no colours

exit codes:
  0  fastcheck can be used here
  1  something is missing or broken, or the device failed a check ("problems")
  2  wrong usage, or no such device here"""


@dataclass
class DoctorReport:
    """The findings of doctor; ``problems`` are what keeps fastcheck from working at full speed or
    at all.
    """

    versions: dict[str, str] = field(default_factory=dict)
    backends: list[tuple[str, bool, str]] = field(default_factory=list)
    cpu_kernels: list[tuple[str, bool, str]] = field(default_factory=list)
    cpu_kernel: str | None = None
    cpu_kernel_reason: str = ""
    device: dict[str, str] = field(default_factory=dict)
    checks: list[CheckResult] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device", help="check this one: cuda, npu, mlu, cpu or another of torch's; cuda:1"
    )
    parser.add_argument("--json", action="store_true", help="one JSON document instead of text")


def run(options: argparse.Namespace) -> int:
    """Exit code 1 when there is a problem, else 0."""
    device = None
    if options.device is not None:
        from fastcheck.selftest import find_device

        device = find_device(options.device)
    report = diagnose()
    color = wants_color(sys.stdout)
    if not options.json:
        show_sections(_sections(report))
    if device is not None:
        for section in _checks(device, report, color):
            if not options.json:
                print()
                show_sections([section])
    if options.json:
        print_json("doctor", _document(report))
    else:
        print()
        show_sections([_result(report, color)])
    return 1 if report.problems else 0


def diagnose() -> DoctorReport:
    """Looks at everything; what fails becomes a problem, never an exception."""
    report = DoctorReport()
    report.versions["fastcheck"] = __version__
    report.versions["python"] = f"{platform.python_version()} ({platform.python_implementation()})"
    report.versions["platform"] = f"{platform.system()} {platform.machine()}"
    torch = _module("torch", report)
    _module("numpy", report)
    report.versions["tools"] = _tools()
    _build(report)
    _kernels(report)
    _backends(torch, report)
    return report


def _module(name: str, report: DoctorReport) -> Any:
    try:
        module = importlib.import_module(name)
    except Exception as error:  # a broken install raises all sorts of things
        report.versions[name] = "missing"
        report.problems.append(f"{name} can't be imported: {first_line(error)}.")
        return None
    report.versions[name] = str(module.__version__)
    return module


def _tools() -> str:
    """The packages of ``fastcheck[tools]``, which single commands use."""
    versions, missing = [], []
    for name in _TOOLS:
        try:
            versions.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            missing.append(name)
    if missing:
        versions.append(f"not {', '.join(missing)} (pip install 'fastcheck[tools]')")
    return ", ".join(versions)


def _build(report: DoctorReport) -> None:
    report.versions["wheel"] = _wheel(kernel_status.label)
    report.versions["kernels"] = kernel_status.text
    report.versions["extension"] = status.text
    if kernel_status.compiler:
        report.versions["compiler"] = kernel_status.compiler
    archs = f" for {kernel_status.cuda_archs}" if kernel_status.cuda_archs else ""
    built = f"built ({kernel_status.accelerator}{archs})"
    report.versions["cuda"] = built if _has_cuda() else "not built"
    if status.is_broken:
        report.problems.append(status.problem[:1].upper() + status.problem[1:] + ".")


def _wheel(label: str) -> str:
    """The purpose of the wheel that was installed, from its version's label
    (``wheels/label.py``).
    """
    torch_release, _, accelerator = label.rpartition(".")
    if not label:
        return "none: built from source"
    if accelerator == "generic":
        return "+generic, for any torch and any accelerator: pure Python"
    read = "the CPU" if accelerator == "cpu" else f"the CPU and CUDA {accelerator[2:]}"
    hooks = "" if torch_release else ", for any torch; hooks in pure Python"
    return f"+{label}, for {read}{hooks}"


def _has_cuda() -> bool:
    return (kernel_status.accelerator or "").lower().startswith("cuda")


def _kernels(report: DoctorReport) -> None:
    kernels: Any = kernel_status.module
    if kernels is None:
        return
    for name, usable, reason in kernels.cpu_isas():
        report.cpu_kernels.append((str(name), bool(usable), str(reason)))
    forced = os.environ.get(_ISA_VARIABLE)
    try:
        report.cpu_kernel = str(kernels.cpu_isa())
    except Exception as error:
        report.problems.append(f"{_ISA_VARIABLE}={forced!r} can't be used: {first_line(error)}.")
        return
    fastest = f"the fastest that this machine can run ({_ISA_VARIABLE} forces another)"
    is_forced = forced and forced != "auto"
    report.cpu_kernel_reason = f"{_ISA_VARIABLE}={forced}" if is_forced else fastest


def _backends(torch: Any, report: DoctorReport) -> None:
    usable = kernel_status.module is not None
    reason = "compiled kernels" if usable else "no compiled kernels: portable reads the CPU"
    report.backends.append(("cpu", usable, reason))
    devices = _cuda_devices(torch)
    visible = f"{counted(devices, 'CUDA device')} visible to torch"
    if usable and _has_cuda():
        from fastcheck.backends import cuda

        problem = cuda.cuda_problem() if devices else None
        reason = f"built; {visible}" + (f"; {problem}" if problem else "")
        report.backends.append(("cuda", devices > 0 and not problem, reason))
    else:
        report.backends.append(("cuda", False, f"not built into this extension; {visible}"))
    if torch is not None:
        report.backends.append(_triton(report))
        for name in ("npu", "mlu"):
            report.backends.append(_entry(name, getattr(torch, name, None)))
    served = "every device without a kernel" + ("" if usable else ", the CPU too")
    report.backends.append(("portable", torch is not None, f"pure Python, for {served}"))


def _entry(name: str, module: Any) -> tuple[str, bool, str]:
    """A device whose tensors Triton's kernels or the portable backend read."""
    if module is None:
        return name, False, f"torch_{name} is not loaded"
    try:
        devices = int(module.device_count()) if module.is_available() else 0
    except Exception as error:  # a driver may raise here
        return name, False, first_line(error)
    if not devices:
        return name, False, f"torch_{name} sees no device"
    return name, True, f"{counted(devices, 'device')}, read by Triton or the portable backend"


def _triton(report: DoctorReport) -> tuple[str, bool, str]:
    from fastcheck.backends.triton import backend as triton

    try:
        usable, reason = triton.try_triton()
    except Exception as error:  # a bad FASTCHECK_TRITON, or a device that can't be used at all
        report.problems.append(f"Triton: {error}")
        return "triton", False, first_line(error)
    return "triton", usable, reason


def _cuda_devices(torch: Any) -> int:
    try:
        return int(torch.cuda.device_count())
    except Exception:  # no torch, or a driver that raises
        return 0


def _checks(device: Any, report: DoctorReport, color: bool) -> Iterator[Section]:
    """Yields the section of the device and of each check, as checks are done. A failed check is
    added to the problems.
    """
    from fastcheck.selftest import FAILED, PASSED, run_checks

    report.device = _about(device)
    yield Section("device", _pairs(report.device))
    for outcome in run_checks(device):
        report.checks.append(outcome)
        style = "green" if outcome.status == PASSED else "yellow"
        text = wrap(outcome.detail, _WIDTH - 10, "  ")
        if outcome.status == FAILED:
            report.problems.append(f"{outcome.name} failed on {device}: {outcome.detail}")
            style, text = "red", ["  see below"]
        head = f"{outcome.name:<12}{paint(outcome.status, style, color)}  {outcome.seconds:.1f} s"
        yield Section("check", [head, *text])


def _about(device: Any) -> dict[str, str]:
    import torch

    from fastcheck.backends.table import backend_for
    from fastcheck.reproducibility.environment import package_versions

    backend = backend_for(device)
    about = {"device": str(device)}
    if device.type != "cpu":
        try:
            about["name"] = str(getattr(torch, device.type).get_device_name(device))
        except Exception:  # not every device's module has names
            about["name"] = "unknown"
    about["backend"] = backend.name
    is_exact = backend.determinism == "bitwise"
    about["sums"] = "the same bits on every machine" if is_exact else "within 1e-6 of abs_sum"
    about["device mode"] = backend.device_mode.name
    about.update(package_versions(_FOR_DEVICES))
    runtimes = {"cuda": torch.version.cuda, "hip": torch.version.hip}
    about.update({name: version for name, version in runtimes.items() if version is not None})
    return about


def _pairs(entries: dict[str, str]) -> list[str]:
    widest = max(len(name) for name in entries)
    return [f"{name:<{widest}}  {value}" for name, value in entries.items()]


def _sections(report: DoctorReport) -> list[Section]:
    def three_columns(entries: list[tuple[str, bool, str]], used: str | None = None) -> Table:
        rows = [
            [name, ("used" if name == used else "usable") if usable else "no", reason]
            for name, usable, reason in entries
        ]
        return Table(["name", "state", "why"], rows, left=3, width=200)

    blocks = [
        Section("versions", _pairs(report.versions)),
        Section("backends", [three_columns(report.backends)]),
    ]
    if report.cpu_kernels:
        parts: list[Part] = [three_columns(report.cpu_kernels, report.cpu_kernel)]
        if report.cpu_kernel is not None:
            used = f"{report.cpu_kernel} is used: {report.cpu_kernel_reason}."
            parts += wrap(used, _WIDTH - 10)
        blocks.append(Section("cpu", parts))
    return blocks


def _result(report: DoctorReport, color: bool) -> Section:
    if not report.problems:
        return Section("result", [paint("fastcheck can be used here.", "green", color)])
    lines = [line for text in report.problems for line in wrap(text, _WIDTH - 10, "- ", "  ")]
    return Section("problems", lines)


def _document(report: DoctorReport) -> dict[str, Any]:
    def listed(entries: list[tuple[str, bool, str]]) -> list[dict[str, Any]]:
        return [
            {"name": name, "usable": usable, "reason": reason} for name, usable, reason in entries
        ]

    return {
        **vars(report),
        "backends": listed(report.backends),
        "cpu_kernels": listed(report.cpu_kernels),
        "checks": [asdict(outcome) for outcome in report.checks],
    }
