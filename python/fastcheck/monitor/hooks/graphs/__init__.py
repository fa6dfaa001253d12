"""Captured graphs: the hooks see a capture once, and each replay gets records of its own.

Imports the step boundaries of ``monitor.hooks``.
"""
