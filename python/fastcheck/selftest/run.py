"""Runs ``fastcheck selftest``: finds the device, runs each check, and collects the results.

A check that raises anything has failed; the others still run.
"""

from __future__ import annotations

import importlib
import platform
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Callable, Optional

import torch

from fastcheck._version import __version__
from fastcheck.errors import ConfigError, did_you_mean, explain
from fastcheck.extension import status
from fastcheck.kernels import status as kernel_status
from fastcheck.reproducibility.environment import package_versions

from .checks import (
    Fault,
    NotCheckable,
    Subject,
    check_found_nonfinite,
    check_kernels,
    check_layouts,
    check_overflow_mode,
    check_special,
    check_streams,
    check_values,
    title_of,
)
from .training import check_install, check_no_sync, measure_throughput

__all__ = [
    "CHECKS",
    "FAILED",
    "NOT_CHECKABLE",
    "PASSED",
    "Outcome",
    "Report",
    "begin",
    "find_device",
]

PASSED, FAILED, NOT_CHECKABLE = "passed", "FAILED", "not checkable here"

#: By name, in the order in which they run. Each returns what it did, as text.
CHECKS: dict[str, Callable[[Subject], Any]] = {
    "values": check_values,
    "special-values": check_special,
    "layouts": check_layouts,
    "found-nonfinite": check_found_nonfinite,
    "kernels": check_kernels,
    "no-sync": check_no_sync,
    "streams": check_streams,
    "overflow-mode": check_overflow_mode,
    "install": check_install,
    "throughput": measure_throughput,
}

#: What registers a device type that torch alone does not have.
_PLUGINS = {"npu": "torch_npu", "mlu": "torch_mlu"}


@dataclass(frozen=True)
class Outcome:
    """One check: its name, what it is about, PASSED, FAILED or NOT_CHECKABLE, and details."""

    name: str
    about: str
    status: str
    detail: str
    seconds: float
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass
class Report:
    """One run. ``outcomes`` grow while :meth:`run` is iterated."""

    subject: Subject
    versions: dict[str, str]
    device: dict[str, str]
    names: Sequence[str]
    outcomes: list[Outcome] = field(default_factory=list)

    def run(self) -> Iterator[Outcome]:
        """Runs the checks, and yields each as it is done."""
        for name in self.names:
            outcome = _outcome(name, self.subject)
            self.outcomes.append(outcome)
            yield outcome

    @property
    def failed(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.status == FAILED]

    @property
    def seconds(self) -> float:
        return sum(outcome.seconds for outcome in self.outcomes)


def begin(device: Optional[str] = None, names: Sequence[str] = ()) -> Report:
    """A report about ``device`` (as ``"cuda"`` or ``"npu:1"``; None: the accelerator if there is
    one, else the CPU), that will run the checks of these names, all of them when there are none.

    Raises:
        ConfigError: there is no such device here, or no such check.
    """
    for name in names:
        if name not in CHECKS:
            raise ConfigError(
                explain(
                    f"unknown check {name!r}",
                    expected=", ".join(CHECKS),
                    got=repr(name),
                    hint=did_you_mean(name, CHECKS),
                )
            )
    subject = Subject(find_device(device))
    chosen = [name for name in CHECKS if name in names] if names else list(CHECKS)
    return Report(subject, _versions(), _about(subject), chosen)


# ---- one check ----------------------------------------------------------------------------------


def _outcome(name: str, subject: Subject) -> Outcome:
    check = CHECKS[name]
    figures: dict[str, Any] = {}
    began = time.perf_counter()
    try:
        found = check(subject)
        result, detail = PASSED, str(found)
        if not isinstance(found, str):
            figures = {"size_bytes": found.size_bytes, "seconds": found.seconds}
    except NotCheckable as reason:
        result, detail = NOT_CHECKABLE, str(reason)
    except Fault as fault:
        result, detail = FAILED, str(fault)
    except Exception as error:  # whatever a backend raises is what this is to find out
        result, detail = FAILED, _error_text(error)
    return Outcome(name, title_of(check), result, detail, time.perf_counter() - began, figures)


def _error_text(error: Exception) -> str:
    """An error in one line, and where it came from, without this machine's paths."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    file = frame.filename.replace("\\", "/").rsplit("/", 1)[-1]
    text = " ".join(str(error).split())
    return f"{type(error).__name__} in {file}:{frame.lineno}: {text[:400]}"


# ---- the device ---------------------------------------------------------------------------------


def find_device(name: Optional[str]) -> torch.device:
    """The device of this name, with its index; ConfigError where it isn't."""
    if name is None:
        name = next((kind for kind in _accelerators() if _is_available(kind)), "cpu")
    kind = name.partition(":")[0]
    if kind in _PLUGINS and not hasattr(torch, kind):
        try:
            importlib.import_module(_PLUGINS[kind])
        except Exception as error:  # a missing driver library raises all sorts of things
            raise _no_device(name, f"{_PLUGINS[kind]} can't be imported: {error}") from None
    try:
        device = torch.device(name)
    except RuntimeError:
        raise _no_device(name, "torch has no such device") from None
    if device.type == "cpu":
        return torch.device("cpu")
    if not _is_available(device.type):
        raise _no_device(name, f"torch finds no {device.type} device")
    module: Any = getattr(torch, device.type)
    index = module.current_device() if device.index is None else device.index
    if not 0 <= index < module.device_count():
        raise _no_device(name, f"torch finds {module.device_count()} of them")
    return torch.device(device.type, index)


def _no_device(name: str, got: str) -> ConfigError:
    present = ["cpu", *(kind for kind in _accelerators() if _is_available(kind))]
    return ConfigError(
        explain(
            f"device {name!r} can't be tested here",
            expected=" or ".join(map(repr, present)),
            got=f"{name!r}: {got}",
            hint=did_you_mean(name, present),
        )
    )


def _accelerators() -> list[str]:
    """Kinds of device that torch has a module for, a vendor's own first."""
    own = str(torch._C._get_privateuse1_backend_name())
    return [kind for kind in (own, "cuda", "xpu") if hasattr(torch, kind)]


def _is_available(kind: str) -> bool:
    try:
        return bool(getattr(torch, kind).is_available())
    except Exception:  # a driver that fails
        return False


# ---- the head of the report ---------------------------------------------------------------------


def _versions() -> dict[str, str]:
    found = {
        "fastcheck": __version__,
        "kernels": kernel_status.text,
        "extension": status.text,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
    }
    found.update(package_versions(("numpy", "triton", "triton-ascend", "torch_npu", "torch_mlu")))
    for name, version in (("cuda", torch.version.cuda), ("hip", torch.version.hip)):
        if version is not None:
            found[name] = version
    return found


def _about(subject: Subject) -> dict[str, str]:
    backend, module = subject.backend, subject.module
    about = {"device": str(subject.device), "name": platform.processor() or platform.machine()}
    if module is not None:
        try:
            about["name"] = str(module.get_device_name(subject.device))
        except Exception:  # not every device's module has names
            about["name"] = "unknown"
    about["backend"] = backend.name
    about["kernels"] = {"portable": "none, torch's own operators"}.get(backend.name, "compiled")
    if kernel_status.module is not None:
        about["cpu kernel"] = str(kernel_status.module.cpu_isa())
    about["sums"] = (
        "the CPU's bits" if backend.determinism == "bitwise" else "within 1e-6 of abs_sum"
    )
    about["device mode"] = backend.device_mode.name
    about["held to"] = (
        "the compiled extension's records of the same tensors on the CPU"
        if subject.compares_with_kernels
        else "records by NumPy; sums within 1e-6"
    )
    return about
