"""A comparison as one HTML file: ``gather`` collects each step while it is compared, ``pair_rows``
has the numbers of each pair of tensors, ``signals`` where loss and norms part, ``document`` makes
the page's data, and ``write`` the file.

Imports ``comparison``, ``comparison.over_time``, ``log``, ``report`` and ``utils``.
"""
