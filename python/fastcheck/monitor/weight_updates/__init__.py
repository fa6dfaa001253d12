"""Finds weights that do not move and buffers that stay constant.

Imports ``calls``, ``log``, ``record``, ``utils`` and ``verdict``.
"""
