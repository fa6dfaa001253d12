"""The command line: ``main`` parses and dispatches, one file per command.

Imports everything.
"""
