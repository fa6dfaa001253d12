"""Comparison over time: which steps are paired, and where losses and schedules drift apart.

Imports ``comparison``, ``record`` and ``utils``.
"""
