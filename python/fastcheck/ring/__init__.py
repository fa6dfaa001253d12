"""Record slots in memory, and their way to the host.

A host ring for the CPU, segments with pinned mirrors for devices, slots of captured graphs.

Imports ``backends``, ``record`` and ``utils``.
"""
