"""Hooks on modules, gradients, optimizers, GradScaler, CUDA graphs and compiled code.

Also the protection of weights from bad updates.

Imports ``monitor.session`` and below.
"""
