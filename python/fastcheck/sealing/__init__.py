"""Seals: checksums of a checkpoint's weights, stored beside it.

``seal`` writes them, ``verification`` compares the checkpoint's files with them.

Imports ``comparison``, ``record``, ``reproducibility``, ``statistics`` and ``utils``.
"""
