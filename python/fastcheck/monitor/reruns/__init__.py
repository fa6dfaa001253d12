"""Runs a training step again from the same state, and compares the checksums of every tensor.

``runner`` makes the runs, ``result`` is what came of them.

Imports ``log``, ``monitor.hooks``, ``monitor.session``, ``record``, ``statistics``, ``utils`` and
``verdict``.
"""
