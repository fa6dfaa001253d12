"""Several ranks: their channel, the agreement to stop, and the comparison of replicas.

Imports ``record``, ``statistics`` and ``utils``.
"""
