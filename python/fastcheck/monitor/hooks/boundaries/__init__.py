"""Where a step of the run ends: which optimizer's step is the last one of an iteration.

Imports ``calls`` and ``utils``.
"""
