"""Reads what a model stores (parameters, buffers, gradients), in list calls, before it changes.

Imports ``backends``, ``calls``, ``log``, ``monitor.hooks``, ``monitor.session``,
``monitor.weight_updates``, ``record``, ``utils`` and ``verdict``.
"""
