"""environment(): versions, hardware and settings that can change numbers, as plain data."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import socket
import sys
import time
from collections.abc import Iterable
from functools import partial
from typing import Any, Callable, Optional

import torch

from fastcheck._version import __version__
from fastcheck.extension import status
from fastcheck.kernels import status as kernel_status
from fastcheck.utils.private import is_secret_name, without_credentials

#: Packages that compute, or change what others compute.
_PACKAGES = (
    *("numpy", "triton", "triton-ascend", "torch_npu", "torch_mlu", "torchvision", "torchao"),
    *("transformers", "accelerate", "deepspeed", "megatron-core", "mindspeed"),
    *("transformer-engine", "flash-attn", "xformers", "apex", "peft", "datasets", "tokenizers"),
    *("lightning", "intel-extension-for-pytorch"),
)
#: Environment variables that kernels, libraries and compilers read, by their beginnings. Nothing
#: else of the environment is looked at, nor a variable whose name says that it holds a secret.
_PREFIXES = (
    *("ACL_", "ASCEND_", "ATB_", "ATEN_", "CLOSE_MATMUL", "CNCL_", "CNNL_", "CUBLAS", "CUDA_"),
    *("CUDNN_", "DNNL_", "FASTCHECK_", "FLASH_", "GLOO_", "GOMP_", "HCCL_", "HIP_", "HSA_"),
    *("INF_NAN_MODE", "KMP_", "LCCL_", "LD_PRELOAD", "MIOPEN_", "MKL_", "MLU_", "NCCL_", "NPU_"),
    *("NVIDIA_TF32_OVERRIDE", "NVTE_", "OMP_", "ONEDNN_", "OPENBLAS_", "PYTHONHASHSEED"),
    *("PYTORCH_", "ROCBLAS_", "TASK_QUEUE_ENABLE", "TORCH", "TRITON_", "XLA_"),
)
# Paths, endpoints and the choice among like devices differ between machines and ranks, and change
# no number.
_NO_NUMBERS = (
    *("_ADDR", "_DIR", "_FILE", "_HOME", "_IFNAME", "_IP", "_PATH", "_PORT", "_RUN_ID", "_SINKS"),
    *("_TOOLKIT", "_VISIBLE_DEVICES"),
)


def environment() -> dict[str, Any]:
    """Everything that could explain a difference between two runs: versions, hardware, torch's
    switches (TF32, deterministic algorithms, attention backends, reduced precision), threads, and
    the environment variables that kernels and libraries read.

    Returns plain dictionaries, ready for ``json.dump``; compare() takes two of them, or their
    files. ``where`` holds the machine, the time and torch's seed; it is never compared.
    Synchronises nothing and starts no device: of an accelerator that is not in use yet, only the
    number of devices is listed.
    """
    return {
        "fastcheck": "environment",
        "format": 1,
        "where": {
            "host": socket.gethostname(),
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "pid": os.getpid(),
            "python": sys.executable,
            # Random without a call of manual_seed().
            "initial_seed": torch.initial_seed(),
        },
        "versions": _versions(),
        "machine": _machine(),
        "devices": _devices(),
        "torch": _switches(),
        "variables": _variables(),
    }


def environment_or_error() -> dict[str, Any]:
    """environment(), or ``{"error": text}`` where it raises: a log or a dump is written all the
    same.
    """
    try:
        return environment()
    except Exception as error:
        return {"error": str(error)}


def _versions() -> dict[str, Any]:
    versions: dict[str, Any] = {
        "python": platform.python_version(),
        "fastcheck": __version__,
        "fastcheck_kernels": kernel_status.text,
        "fastcheck_extension": status.text,
        "torch": torch.__version__,
        "torch_git": torch.version.git_version,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "cudnn": _ask(torch.backends.cudnn.version),
    }
    return {**versions, **package_versions(_PACKAGES)}


def package_versions(names: Iterable[str]) -> dict[str, str]:
    """The versions of those of these packages that are installed; "unknown" for broken metadata."""
    versions = {name: _package_version(name) for name in names}
    return {name: version for name, version in versions.items() if version is not None}


@functools.cache  # a search of all directories of sys.path for each name
def _package_version(name: str) -> Optional[str]:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
    except Exception:  # the metadata are another package's
        return "unknown"


def _machine() -> dict[str, Any]:
    return {
        "system": platform.system(),
        "architecture": platform.machine(),
        "cpu": _cpu(),
        "cpu_capability": _ask(lambda: torch.backends.cpu.get_cpu_capability()),
        "cores": os.cpu_count(),
        "byte_order": sys.byteorder,
    }


def _cpu() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.lower().startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor()


def _devices() -> dict[str, Any]:
    devices: dict[str, Any] = {}
    for kind in ("cuda", "xpu", "npu", "mlu"):
        module: Any = getattr(torch, kind, None)
        if module is None:
            continue
        count = _ask(module.device_count)
        if not isinstance(count, int) or count < 1:
            continue
        described: dict[str, Any] = {"count": count}
        # A query for the name of an unused device would start its driver in this process.
        if _ask(module.is_initialized) is True:
            described["names"] = _ask(partial(_names, module, count))
            described["capability"] = _ask(getattr(module, "get_device_capability", None))
        devices[kind] = described
    mps = getattr(torch.backends, "mps", None)
    if mps is not None and _ask(mps.is_available) is True:
        devices["mps"] = {"count": 1}
    return devices


def _names(module: Any, count: int) -> list[str]:
    return [str(module.get_device_name(index)) for index in range(count)]


def _switches() -> dict[str, Any]:
    """torch's global switches that change how it computes."""
    cuda, cudnn, matmul = torch.backends.cuda, torch.backends.cudnn, torch.backends.cuda.matmul
    npu: Any = getattr(torch, "npu", None)  # torch_npu puts it there
    switches: dict[str, Optional[Callable[[], Any]]] = {
        "deterministic": torch.are_deterministic_algorithms_enabled,
        "deterministic_warn_only": torch.is_deterministic_algorithms_warn_only_enabled,
        "float32_matmul_precision": torch.get_float32_matmul_precision,
        "default_dtype": lambda: str(torch.get_default_dtype()),
        "threads": torch.get_num_threads,
        "interop_threads": torch.get_num_interop_threads,
        "flush_denormal": _flushes_denormals,
        "anomaly_mode": torch.is_anomaly_enabled,
        "cudnn_enabled": lambda: cudnn.enabled,
        "cudnn_deterministic": lambda: cudnn.deterministic,
        "cudnn_benchmark": lambda: cudnn.benchmark,
        "cudnn_allow_tf32": lambda: cudnn.allow_tf32,
        "matmul_allow_tf32": lambda: matmul.allow_tf32,
        "matmul_fp16_reduced": lambda: matmul.allow_fp16_reduced_precision_reduction,
        "matmul_bf16_reduced": lambda: matmul.allow_bf16_reduced_precision_reduction,
        "matmul_fp16_accumulation": lambda: matmul.allow_fp16_accumulation,
        "preferred_blas": lambda: str(cuda.preferred_blas_library()),
        "preferred_linalg": lambda: str(cuda.preferred_linalg_library()),
        "sdpa_flash": cuda.flash_sdp_enabled,
        "sdpa_mem_efficient": cuda.mem_efficient_sdp_enabled,
        "sdpa_math": cuda.math_sdp_enabled,
        "sdpa_cudnn": getattr(cuda, "cudnn_sdp_enabled", None),
        "mkldnn": lambda: torch.backends.mkldnn.enabled,
        "autocast": _autocast,
        "npu_jit_compile": lambda: not npu.is_jit_compile_false(),
        "npu_hf32_matmul": lambda: npu.matmul.allow_hf32,
        "npu_hf32_conv": lambda: npu.conv.allow_hf32,
    }
    settings = {name: _ask(read) for name, read in switches.items()}
    # A switch that this release of torch doesn't have is none.
    return {name: value for name, value in settings.items() if value is not None}


def _autocast() -> dict[str, str]:
    on = {}
    for kind in ("cpu", "cuda", "npu", "mlu", "xpu"):
        try:
            if torch.is_autocast_enabled(kind):
                on[kind] = str(torch.get_autocast_dtype(kind))
        except (RuntimeError, TypeError, AttributeError):
            continue
    return on


def _flushes_denormals() -> bool:
    """True if the CPU flushes subnormals. torch has no getter for it, so a product is computed."""
    small = torch.full((), 1e-39, dtype=torch.float32, device="cpu")
    return bool((small * 1.0).view(torch.int32) == 0)


def _variables() -> dict[str, str]:
    return {
        name: without_credentials(value)
        for name, value in sorted(os.environ.items())
        if name.startswith(_PREFIXES)
        and not name.endswith(_NO_NUMBERS)
        and not is_secret_name(name)
    }


def _ask(read: Optional[Callable[[], Any]]) -> Any:
    """The answer of ``read``; None where this torch, or this machine, has no such thing."""
    try:
        return None if read is None else read()
    except Exception:  # a missing attribute, a failing driver, a new rule of torch's
        return None
