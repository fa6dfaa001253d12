"""``observe(name, tensor)``: tensors that user code names, each read as a site of its own.

Imports ``calls``, ``monitor.hooks``, ``monitor.op_level``, ``record``, ``ring``, ``utils`` and
``verdict``.
"""
