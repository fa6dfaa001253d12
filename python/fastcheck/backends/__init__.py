"""Kernels that compute the value fields of a record, one backend for each kind of device.

``table`` chooses the backend of a device: compiled kernels (``cpu``, ``cuda``), Triton kernels
(``triton``), or torch operators (``portable``). ``npu`` reads the overflow mode of NPUs and
MLUs. ``backend`` defines the interface, ``complete_records`` adds the other fields of a record.

Imports ``record`` and ``utils``.
"""
