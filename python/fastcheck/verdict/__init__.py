"""Decides which non-finite records are events, and when their number stops the run.

Three terms: an incident is an operator call that read or wrote non-finite values (op level only); a
finding is a non-finite record while its verdict is open; an event is a finding with its final
verdict, and a counted event may stop the run. ``entries`` and ``step`` hold what was seen in a
step, ``findings`` what is known of it; ``module_rules`` and ``op_rules`` judge. ``findings`` counts
events, too.

Imports ``calls``, ``record`` and ``utils``.
"""
