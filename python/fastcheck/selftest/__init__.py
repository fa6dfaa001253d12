"""``fastcheck selftest``: compares a device's records with a reference, and trains a model on it.

Imports ``backends``, ``monitor``, ``record``, ``report``, ``reproducibility``, ``statistics`` and
``utils``.
"""
