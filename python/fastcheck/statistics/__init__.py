"""Public functions of one tensor: stats(), exponents(), checksum(), crc32() and
found_nonfinite().

Also ``torch.ops.fastcheck``, and the distance between two tensors.

Imports ``backends``, ``record`` and ``utils``.
"""
