"""Suggestions of the stop report, derived from the records around the event; ``watched``: those
of a warning of the watch.

Imports ``record``, ``report`` and ``utils``.
"""
