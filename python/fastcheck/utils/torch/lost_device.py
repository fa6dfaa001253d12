"""Errors by which torch, or fastcheck's kernels, report that a device is lost to this process."""

from __future__ import annotations

# Texts of cudaGetErrorString and hipGetErrorString. After any of these every call on the device
# fails until the process ends (CUDA runtime API, cudaError_t).
_TEXTS = (
    "Invalid access of peer GPU memory over nvlink or a hardware error",
    "an async error has occured in external entity outside of CUDA",
    "an illegal instruction was encountered",
    "an illegal memory access was encountered",
    "device-side assert triggered",
    "hardware stack error",
    "invalid program counter",
    "misaligned address",
    "operation not supported on global/shared address space",
    "tensor memory not completely freed",
    "the MPS client has been terminated by the server",
    "the launch timed out and was terminated",
    "uncorrectable ECC error encountered",
    "uncorrectable NVLink error detected",
    "unspecified launch failure",
)


def is_lost(error: BaseException) -> bool:
    """True if an error means that the device can't be used any more, because a kernel has failed
    that ran before the call that raised it: that call itself is not to blame.
    """
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _TEXTS)
