"""The 192-byte record of one tensor, the site it comes from, and the event it may be.

Data only, with NumPy: no torch, no device. ``reference`` computes a record slowly, as its format
document says; every implementation is held to it.

Imports no other room.
"""
