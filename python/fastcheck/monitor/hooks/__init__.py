"""Hooks on modules, gradients, optimizers, GradScaler, CUDA graphs and compiled code.

``module_observer`` and ``optimizers`` have the hooks. ``step_watcher`` follows the training loop:
``scaling`` knows what a GradScaler did, ``evaluations`` the closures of optimizers, and
``flat_optimizer`` is for optimizers that torch's hooks do not see. ``losses`` reads the losses and
their graphs, ``step_ends`` finds where unusual loops end their steps, ``step_numbers`` reads loss
scales and learning rates. ``state_reader`` reads parameters, gradients and buffers before they
change. ``protection`` keeps bad updates out of the weights: on a device by ``found_inf`` of fused
optimizers, in host memory by removing the gradients for the time of the step. ``graphs`` follows
captured graphs, whose replays get records of their own.

Imports ``backends``, ``calls``, ``monitor.loop``, ``monitor.session``, ``monitor.weights``,
``record``, ``ring``, ``utils`` and ``verdict``.
"""
