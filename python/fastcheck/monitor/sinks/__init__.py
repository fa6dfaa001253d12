"""Scalars of each step for experiment trackers, stops and warnings for those who operate runs, and
a thread that writes.

Imports ``log``, ``monitor.session``, ``record``, ``report``, ``utils`` and ``verdict``.
"""
