"""``install()`` and the Monitor it returns.

Its rooms, from the bottom: ``weight_updates`` and ``distributed``, ``session`` (one monitor at
work), ``hooks`` (hooks on torch), ``op_level``, ``named_tensors`` (``observe()``).

Imports everything below ``selftest``, ``compat`` and ``cli``.
"""
