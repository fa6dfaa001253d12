"""Suggestions of the stop report, derived from the records around the event.

Imports ``report`` modules below it, ``utils`` and ``record``.
"""
