"""A training step computed in ways that must agree: ``prove()``.

``relation`` is the base of the ways; ``batches``, ``models`` and ``ranks`` are those that come with
it: the batch in another form, the model computed otherwise, several processes. ``case`` is a step
and its state, of the batch that ``given`` describes; ``observer`` reads it into what ``computed``
holds, with ``torch_calls`` for what torch calls on the way. ``score`` measures the noise, holds two
computations to it and finds where they part, ``result`` is what came of it, and ``prove`` the
public function, with ``page`` for a page of it. ``golden`` is a relation to a file, which
the plugin of pytest has as a fixture.

Imports ``monitor``, ``report`` and ``utils``.
"""
