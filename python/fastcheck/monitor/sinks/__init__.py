"""Scalars of each step for experiment trackers: one file a library, a thread that writes.

Imports ``monitor/session`` and below.
"""
