"""``install(record="range")``: exponents of what is read in some steps, and the advice from them.

``range_session`` counts in these steps, and brings the counts to the host; ``results`` has
``monitor.advice()``.

Imports ``backends``, ``calls``, ``monitor.session``, ``record``, ``ring`` and ``utils``.
"""
