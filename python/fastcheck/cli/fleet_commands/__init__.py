"""The commands on the logs of many ranks: ``collect``, ``compact`` and
``fleet``.

Imports ``fleet``, ``log`` and ``utils``.
"""
