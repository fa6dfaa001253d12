"""Several ranks: their channel, the agreement to stop, and the comparison of replicas.

Imports ``statistics``, ``ring`` and below.
"""
