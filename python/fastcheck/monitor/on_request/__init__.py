"""Op level, or a dump, for some steps of a run that is under way.

Imports ``calls``, ``dump``, ``monitor.hooks``, ``monitor.session``, ``report`` and ``utils``.
"""
