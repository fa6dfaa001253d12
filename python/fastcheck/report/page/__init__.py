"""A log as one HTML file: ``collect`` reads the log in pieces into arrays (``grid``), ``write`` and
``container`` make them the page's data, and ``write`` the file. ``container``, ``grid`` and
``parts`` serve pages of comparisons too. Script and style are built from the sources of the front
end, and committed in ``assets``.

Imports ``log``, ``record``, ``report``, ``report.advice`` and ``utils``.
"""
