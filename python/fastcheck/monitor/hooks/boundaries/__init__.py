"""Finds where a step of the run ends, with several optimizers or with updates that the loop skips.

Imports ``calls``, ``monitor.session`` and ``utils``.
"""
