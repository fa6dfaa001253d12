"""``observe(name, tensor)``: tensors that user code names, each read as a site of its own.

Imports ``op_level``, ``hooks``, ``session`` and everything below ``monitor``.
"""
