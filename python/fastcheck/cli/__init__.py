"""The command line: ``main`` parses and dispatches, one file per command; ``fleet_commands`` are
those on many ranks.

Imports ``backends``, ``comparison``, ``dump``, ``fleet``, ``log``, ``monitor``, ``proving``,
``record``, ``report``, ``reproducibility``, ``sealing`` and ``utils``.
"""
