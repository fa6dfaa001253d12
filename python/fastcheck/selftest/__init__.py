"""``fastcheck selftest``: compares a device's records with a reference, and trains a model on it.

Imports ``monitor`` and below.
"""
