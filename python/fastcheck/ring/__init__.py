"""Record slots in memory, and their way to the host.

A host ring for the CPU (``host``), segments with pinned mirrors for devices (``segments``,
``device``), slots of captured graphs (``graph_slots``).

Imports ``backends``, ``record`` and ``utils``.
"""
