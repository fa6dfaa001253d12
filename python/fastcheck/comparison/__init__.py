"""compare(): two runs, dumps or checkpoints, and the first thing in which they differ.

In the order of the data flow: ``sources`` read either side into the Blocks of ``block``, with the
same ``names`` for the same tensors; ``over_time`` pairs the steps, also those of a run that
continues another, ``split`` is about batches in other parts, and ``layout`` puts together what one
side has in parts, on ranks or in modules; ``align`` matches the tensors of two Blocks, and
``measure`` computes how far records and updates are apart; ``run`` does so block by block with what
is in ``steps``, and ``tally`` collects the outcome. ``relation`` proves by the elements how two
tensors belong together. ``origin`` is the first tensor with other bits, and ``advice`` says where
to look, with what ``batches`` finds in the order of the batches and ``programs`` in the programs
themselves. ``page`` makes an HTML file of it. ``nested_diff`` compares environments and
hyper-parameters. ``questions`` turns the outcome into
answers; ``result``, ``row`` and ``render`` present them. ``compare`` is the public function, with
what it returns and remarks. The package is not called compare, because importing it would replace
the function ``fastcheck.compare`` by a module.

Imports ``dump``, ``log``, ``record``, ``report``, ``statistics`` and ``utils``.
"""
