"""The 192-byte record of one tensor, the site it comes from, and the event it may be.

Data only, with NumPy: no torch, no device. ``reference`` computes a record slowly, as its format
document says; every implementation is compared with it.

Imports no other room.
"""
