"""The command line: ``main`` parses and dispatches, one file per command.

Imports ``backends``, ``comparison``, ``dump``, ``log``, ``monitor``, ``record``, ``report``,
``sealing``, ``selftest`` and ``utils``.
"""
