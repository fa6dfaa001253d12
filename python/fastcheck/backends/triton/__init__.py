"""Records from Triton kernels: GPUs without the CUDA extension, and NPUs with triton-ascend.

Imports ``record``, ``utils`` and ``backends.portable``.
"""
