"""The verdict at op level: findings by operator, their origin by provenance, their consequences.

Imports the findings, journal and places of ``verdict``.
"""
