"""Environment, model inventory and seeds: what two runs must share to give the same numbers.

Imports ``utils``.
"""
