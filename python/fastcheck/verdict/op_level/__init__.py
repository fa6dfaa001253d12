"""The verdict at op level: findings by operator, their origin by provenance, their consequences.

Imports ``record``, ``utils`` and ``verdict``.
"""
