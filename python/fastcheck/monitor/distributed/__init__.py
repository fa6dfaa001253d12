"""Several ranks: their channel, the agreement to stop, and the comparison of replicas.

Imports ``backends``, ``record``, ``statistics`` and ``utils``.
"""
