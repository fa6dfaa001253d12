"""Records from Triton kernels: GPUs without the CUDA extension, and NPUs with triton-ascend.

Imports ``backends``, ``backends.portable``, ``record`` and ``utils``.
"""
