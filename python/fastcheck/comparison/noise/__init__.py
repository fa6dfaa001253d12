"""Differences that rounding noise explains: gradients whose terms cancel, and their updates.

Imports ``comparison``, ``record`` and ``statistics``.
"""
