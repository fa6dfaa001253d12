"""The 192-byte record of one tensor, the site it comes from, and the event it may be.

Data only, with NumPy: no torch, no device.

Imports no other room.
"""
