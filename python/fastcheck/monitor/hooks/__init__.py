"""Hooks on modules, gradients, optimizers, GradScaler, CUDA graphs and compiled code.

``module_observer`` and ``optimizers`` have the hooks, ``step_watcher`` finds step boundaries, with
``boundaries`` for unusual loops, ``facts`` what a training loop does that is in no record.
``stored`` reads parameters, gradients and buffers, ``protect`` keeps bad updates out of the
weights, ``graphs`` follows captured graphs.

Imports ``backends``, ``calls``, ``log``, ``monitor``, ``monitor.session``, ``record``, ``ring``,
``utils`` and ``verdict``.
"""
