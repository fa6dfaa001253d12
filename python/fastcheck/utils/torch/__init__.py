"""Helpers for torch's own objects.

Readable tensors, nested structures, streams, sharding, operator schemas, training state, patched
methods, frames.

Imports ``record``.
"""
