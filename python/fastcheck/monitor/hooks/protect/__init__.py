"""Keeps a bad update out of the weights: on a device by the ``found_inf`` of fused optimizers, in
host memory by removing the gradients for the time of the optimizer's step. ``closures`` does it for
gradients that a closure makes within the step.

Imports ``backends``, ``monitor.session`` and ``utils``.
"""
