"""Records from torch operators alone: any device, any torch, no compiled extension.

Imports ``backends``, ``record`` and ``utils``.
"""
