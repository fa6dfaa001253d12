"""The command line: ``main`` parses and dispatches, one file per command: its texts of help, its
options and what runs it.

Imports ``backends``, ``comparison``, ``dump``, ``fleet``, ``log``, ``monitor``, ``proving``,
``record``, ``report``, ``reproducibility``, ``sealing`` and ``utils``.
"""
