"""Kernels that compute the value fields of a record, one backend for each kind of device.

``table`` chooses the backend: compiled kernels (CPU, CUDA), Triton kernels, or torch operators
(``portable``).

Imports ``record`` and ``utils``.
"""
