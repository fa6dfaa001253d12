"""The stop report: its data, its text and its advice, and the actions that deliver it.

Imports ``log``, ``verdict``, ``utils`` and ``record``.
"""
