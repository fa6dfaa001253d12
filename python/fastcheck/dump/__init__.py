"""Dumper: the inputs and outputs of operators or modules of a step, written to disk.

``dumper`` is the context manager, which records parameters, buffers and gradients; ``options`` are
its options. ``op_calls`` (in Python and in C++), ``module_calls`` and ``api_calls`` record calls.
``reference`` runs operators again on the CPU, and estimates the difference that rounding explains.
All of them write through ``dump_writer`` to the files of ``storage``. ``on_stop`` dumps the call
that stopped a run.

Imports ``backends``, ``calls``, ``log``, ``record``, ``report``, ``reproducibility``,
``statistics`` and ``utils``.
"""
