"""A dump as one HTML file: ``operators`` chooses the calls around the culprit and collects what
they read and returned, ``histogram`` counts the stored values, and ``write`` makes the file.

Imports ``dump.storage``, ``log``, ``record``, ``report`` and ``utils``.
"""
