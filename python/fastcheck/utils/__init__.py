"""Helpers that do not depend on monitoring.

``reading``: regular files; ``private``: files that their owner alone can read; ``text``: numbers
and tables as plain text; ``names``: operators, APIs and modules as torch and msprobe write them;
``torch``: torch's own objects.

Imports ``record``.
"""
