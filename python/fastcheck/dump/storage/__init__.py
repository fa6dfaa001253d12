"""The files of a dump.

``files`` names, claims and reads them, ``record_writer`` and ``shards`` write tensors, each content
once.

Imports ``backends``, ``log``, ``record``, ``statistics`` and ``utils``.
"""
