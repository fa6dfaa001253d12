"""A comparison as one HTML file: ``gather`` collects each step while it is compared, with the
numbers of each pair of tensors, and ``write`` makes the page's data and the file.

Imports ``comparison``, ``comparison.steps``, ``log``, ``report`` and ``utils``.
"""
