"""matplotlib figures: ``run`` of the steps and layers of a run, ``tensors`` of single tensors, and
``errors`` of a comparison; ``canvas`` makes an empty one. Without pyplot, which has global state.

Imports ``log``, ``record``, ``report.live`` and ``utils``.
"""
