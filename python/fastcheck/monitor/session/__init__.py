"""A monitor at work: options, events, the drain of device records, step boundaries, the stop.

Imports ``backends``, ``calls``, ``log``, ``monitor.distributed``, ``record``, ``report``,
``reproducibility``, ``ring``, ``utils``, ``verdict`` and ``watch``.
"""
