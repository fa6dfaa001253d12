"""The stop report: its data, its text and its advice, and OverflowDetected.

``stop_report`` is the report as data, ``render`` its text, ``advice`` its suggestions; ``build``
makes a report, of a run or of its log. ``page`` makes an HTML page of a log; ``live`` shows one
while it grows.

Imports ``log``, ``record`` and ``utils``.
"""
