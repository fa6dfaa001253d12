"""Decides which non-finite records are events, and when their number stops the run.

Imports ``calls``, ``utils`` and ``record``.
"""
