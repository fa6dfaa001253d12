"""``install(stop=Stop(dump=...))``: the call that stopped a run, kept while it runs
(``captured_op``, ``captured_module``) and dumped (``stop_dumper``), with a ``script`` that runs it
again.

Imports ``dump.session``, ``dump.storage``, ``report``, ``calls`` and the rooms below.
"""
