"""One monitor at work: options, events, the drain of device records, step boundaries, the stop.

Imports ``monitor.distributed``, ``monitor.weight_updates`` and the rooms below ``monitor``.
"""
