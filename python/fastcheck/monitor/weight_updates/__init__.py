"""Finds weights that do not move and buffers that stay constant.

Imports ``verdict``, ``log`` and below.
"""
