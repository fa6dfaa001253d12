"""The display of ``fastcheck top`` of a log that grows: ``trends`` holds the last steps of each
site, ``state`` the ranks, the steps and the events, and ``frame`` makes the lines of one picture.

Imports ``log``, ``record``, ``report`` and ``utils``.
"""
