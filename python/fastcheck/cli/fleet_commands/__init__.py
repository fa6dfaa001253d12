"""The commands on the logs of many ranks: ``collect``.

Imports ``fleet`` and ``log``.
"""
