"""One reader for each kind of thing that can be compared; ``open`` chooses it.

Each gives its side the form of ``comparison.block``. Imports that, ``dump``, ``log``
and below.
"""
