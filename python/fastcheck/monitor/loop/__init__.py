"""Facts of a training loop that no record holds, for the invariants of the watch.

``facts`` is told by the hooks what the loop does, and ``streaks`` counts in how many updates in a
row a fact holds. ``chains`` follows the gradient of one parameter of an optimizer; ``models``,
``schedulers`` and ``beginnings`` look at models, schedulers and optimizers that begin.
``loss_forms`` looks at the graph of a loss with ``nodes``, ``axes``, ``masks``, ``targets``,
``objectives`` (losses of a known kind) and ``since_last_look``;
``update_losses`` and ``micro_batches`` at the losses of one update; ``averages``, ``frozen``,
``stale_copies`` and ``identities`` at weights and copies of them; ``hand_changes`` finds whether
the loop changes gradients itself.

Imports ``calls``, ``monitor.session``, ``monitor.weights`` and ``utils``.
"""
