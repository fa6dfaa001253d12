"""Reads what a model stores (parameters, buffers, gradients), in list calls, before it changes.

Imports ``backends``, ``calls``, ``log``, ``monitor``, ``monitor.hooks``, ``monitor.session``,
``record``, ``utils`` and ``verdict``.
"""
