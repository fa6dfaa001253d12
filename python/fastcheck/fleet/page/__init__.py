"""A fleet's report as one HTML file: ``verdict`` is its text, which can be read without the script,
``document`` the data of the heat map and the tables, and ``write`` makes the file.

Imports ``fleet`` and ``report``.
"""
