"""Scalars of each step for experiment trackers: one file per library, and a thread that writes.

Imports ``log``, ``monitor.session``, ``record``, ``report``, ``utils`` and ``verdict``.
"""
