"""Captured graphs: the hooks see a capture once, and each replay gets records of its own.

Imports ``calls``, ``monitor``, ``monitor.hooks``, ``monitor.session``, ``ring``,
``utils`` and ``verdict``.
"""
