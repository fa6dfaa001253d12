"""Weights that do not move, and gradients that are missing or 0, by checksums before each update.

``updates`` notes at each update what records lack; ``stalled`` decides where the records arrive,
with ``buffers`` for those that no pass changes; ``zero_gradients`` finds where a gradient became 0.

Imports ``calls``, ``log``, ``record``, ``statistics``, ``utils``, ``verdict`` and ``watch``.
"""
