"""compare(): two runs, dumps or checkpoints, and the first thing in which they differ.

In the order of the data flow: ``sources`` read either side into the Blocks of ``block``; ``align``
matches their tensors; ``measure`` computes how far each pair is apart; ``run`` does so block by
block and ``tally`` collects the outcome; ``questions`` turns it into answers; ``result``,
``render`` and ``csv_file`` present them. The package is not called ``compare``: importing it would
replace the function ``fastcheck.compare`` by a module.

Imports ``dump``, ``log``, ``statistics``, ``utils`` and ``record``.
"""
