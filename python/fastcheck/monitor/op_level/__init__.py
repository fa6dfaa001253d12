"""``level="op"``: every operator is observed through the dispatcher.

Imports ``backends``, ``calls``, ``dump``, ``log``, ``monitor.hooks``, ``monitor.session``,
``record``, ``ring``, ``utils`` and ``verdict``.
"""
