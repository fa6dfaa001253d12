"""The commands on the logs of many ranks: ``collect`` and ``fleet``.

Imports ``fleet``, ``log`` and ``utils``.
"""
