"""The logs of many ranks as Parquet files, and the questions that are asked of them.

``schema`` is the form of the tables, ``store`` where they lie. ``collector`` converts the log of a
node (``positions`` read what is new in it, ``manifest`` what has been written). ``questions`` is
the SQL, ``engines`` runs it, and names a file that it can't read, and ``judgement`` makes
``findings`` of the answers, with what chance explains left out. ``page`` writes all of it as HTML.

Imports ``log``, ``record``, ``report`` and ``utils``.
"""
