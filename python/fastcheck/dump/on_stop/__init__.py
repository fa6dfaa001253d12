"""``install(stop=Stop(dump=...))``: the call that stopped a run, kept while it runs
(``captured_op``, ``captured_module``) and dumped (``stop_dumper``), with a ``script`` that runs it
again.

Imports ``calls``, ``dump``, ``dump.storage``, ``log``, ``record``, ``report``, ``reproducibility``,
``statistics`` and ``utils``.
"""
