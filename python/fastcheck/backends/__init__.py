"""Kernels that compute the value fields of a record, one backend for each kind of device.

``table`` chooses the backend of a device: compiled kernels (``cpu``, ``cuda``), Triton kernels
(``triton``), or torch operators (``portable``). ``npu`` and ``mlu`` read the overflow mode of these
devices. ``backend`` defines the interface, ``complete_records`` adds the other fields of a record,
``exponents`` counts exponents.

Imports ``record`` and ``utils``.
"""
