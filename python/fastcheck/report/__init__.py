"""The stop report: its data, its text and its advice, and OverflowDetected.

``stop_report`` is the report as data, ``render`` its text, ``advice`` its suggestions; ``build``
and ``from_log`` make one. ``page`` makes an HTML page of a log; ``live`` shows one while it
grows.

Imports ``log``, ``record`` and ``utils``.
"""
