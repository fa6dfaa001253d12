"""Numbers, sizes and tables as plain text and JSON.

Imports ``record``.
"""
