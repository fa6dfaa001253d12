"""The files of a dump.

``files`` names and claims them, ``record_writer`` and ``shards`` write tensors, each content
once, ``reading`` reads a dump.

Imports ``backends``, ``log``, ``record``, ``statistics`` and ``utils``.
"""
