"""Checksums of weights that have to be the same elsewhere or later: ``seal()``, ``verify()``,
``receipt()``.

``seal`` writes them beside a checkpoint and compares a checkpoint with them; ``receipts`` makes a
list of them for a model that weights are sent to, and ``arrival`` compares that model with it;
``reading`` reads the weights; ``resuming`` has the checksums of a run's whole state.

Imports ``comparison``, ``log``, ``monitor``, ``record``, ``reproducibility``, ``statistics`` and
``utils``.
"""
