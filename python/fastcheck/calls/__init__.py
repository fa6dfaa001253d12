"""Tracks the running module, operator or API call, names it, and selects calls by name.

Imports ``record``, ``ring`` and ``utils``.
"""
