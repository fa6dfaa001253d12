"""Suggestions of the stop report, derived from the records around the event.

Imports ``record``, ``report`` and ``utils``.
"""
