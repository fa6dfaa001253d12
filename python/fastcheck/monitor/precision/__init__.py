"""``install(record="range")``: exponents of what is read in some steps, and the advice from them.

``range_session`` counts in these steps, ``readings`` brings the counts to the host and adds them up
by site, ``results`` has ``monitor.advice()``.

Imports ``backends``, ``monitor.session``, ``record``, ``ring`` and ``utils``.
"""
