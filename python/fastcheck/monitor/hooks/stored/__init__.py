"""Reads what a model stores (parameters, buffers, gradients), in list calls, before it changes.

Imports ``monitor.session`` and below.
"""
