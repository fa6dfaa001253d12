"""Scripts written for ptdbg_ascend, msprobe or Cambricon Catch, run by changing their import.

``ptdbg``, ``msprobe`` and ``catch`` have the names of those tools, over install(), Dumper,
seed_all() and compare(). ``_apis`` numbers calls of torch's API, ``_overflows`` watches and
``_dumps`` dumps for them; ``_msprobe_config`` reads config.json.
"""
