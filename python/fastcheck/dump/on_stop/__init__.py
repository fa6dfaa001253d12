"""``install(stop=Stop(dump=...))``: the operator that stopped a run, kept while it runs
(``captured_op``) and dumped (``stop_dumper``), with a ``script`` that runs it again.

Imports ``calls``, ``dump``, ``dump.storage``, ``log``, ``record``, ``report``, ``reproducibility``
and ``utils``.
"""
