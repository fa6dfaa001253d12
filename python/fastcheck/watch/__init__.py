"""Watches the records of a run over its steps: what left its usual range, what did so first, and
when a tensor will overflow.

``watcher`` takes the records of a step and returns its events. ``signals`` makes signals of the
records, ``bands`` holds their usual ranges, ``movers`` the order in which they left these, from
which ``autopsy`` finds the cause; ``numbers``, ``explosions``, ``stuck`` and ``forecast`` hold
rules.

Imports ``log``, ``record`` and ``utils``.
"""
