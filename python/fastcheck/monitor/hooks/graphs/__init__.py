"""Captured graphs: the hooks see a capture once, and each replay gets records of its own.

Imports ``calls``, ``monitor.hooks``, ``monitor.session``, ``monitor.weight_updates``, ``ring``,
``utils`` and ``verdict``.
"""
