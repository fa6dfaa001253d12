"""The record log: writes it, reads it, makes a table of it; and the history of the last steps.

Imports ``record`` and ``utils``.
"""
