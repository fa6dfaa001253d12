"""Op level, or a dump, for some steps of a run that is under way. May import ``dump/``,
``monitor/hooks/``, and what is below them.
"""
