"""A training step computed in ways that must agree: ``prove()``.

``case`` is a step and its state, of the batch that ``given`` describes, and the base of the ways to
compute it; ``batches``, ``models`` and ``ranks`` are those that come with it: the batch in another
form, the model computed otherwise, several processes. ``observer`` reads what a computation holds
and calls. ``score`` measures the noise, holds two computations to it and finds where they part,
``result`` is what came of it, as data, text and page, and ``prove`` the public function.

Imports ``monitor``, ``report`` and ``utils``.
"""
