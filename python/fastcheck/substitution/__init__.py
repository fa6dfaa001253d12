"""Operators computed on another device or in a wider dtype: ``override()`` and ``bisect()``.

Imports ``calls``, ``record`` and ``utils``.
"""
