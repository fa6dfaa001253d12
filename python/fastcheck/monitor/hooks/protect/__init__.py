"""Keeps a bad update out of the weights: by ``found_inf`` on a device, or by removing the gradients
for the time of the optimizer's step in host memory.

Imports ``utils`` and ``errors``.
"""
