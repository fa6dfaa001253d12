"""``level="op"``: every operator is observed through the dispatcher.

Imports ``monitor.hooks`` and below.
"""
