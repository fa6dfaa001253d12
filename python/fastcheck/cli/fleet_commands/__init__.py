"""The commands on the logs of many ranks: ``collect``, ``compact`` and
``fleet``.

Imports ``cli``, ``fleet``, ``log`` and ``utils``.
"""
