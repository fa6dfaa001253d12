"""``fastcheck doctor --device``: holds a device's records to the reference, and trains on it.

Imports ``backends``, ``monitor``, ``record``, ``report``, ``statistics`` and ``utils``.
"""
