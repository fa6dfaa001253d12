"""Keeps a bad update out of the weights: on the device by ``found_inf``, in host memory by a copy.

Imports ``utils`` and ``errors``.
"""
