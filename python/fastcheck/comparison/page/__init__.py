"""A comparison as one HTML file: ``gather`` collects each step while it is compared, ``pair_rows``
has the numbers of each pair of tensors, and ``write`` makes the page's data and the file.

Imports ``comparison``, ``comparison.over_time``, ``log``, ``report`` and ``utils``.
"""
