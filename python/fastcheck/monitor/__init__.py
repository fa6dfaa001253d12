"""``install()`` and the Monitor it returns.

Its rooms, from the bottom: ``weight_updates``, ``stale_copies`` and ``distributed``; ``session``
(one monitor at work); ``precision`` (exponent counts); ``sinks`` (scalars for trackers); ``hooks``
(hooks on torch); ``op_level``; ``named_tensors`` (``observe()``); ``on_request`` (op level or a
dump for some steps of a running program); ``reruns`` (the same step several times). Above them
``watching`` (``monitor.watch``), ``replay``, ``makers`` with ``loss_graph``, ``kept_graph``,
``call_again``, ``second_run`` and ``variables`` (the operator that made the numbers of a stop, and
the variable that holds them), ``ended`` (an exception of the program's own); ``core``, which makes
all parts; ``showing`` (what a Monitor shows), ``monitor``, ``install``, ``rerun``, ``next_steps``
(a log of the steps that follow) and ``auto_install``.

Imports ``backends``, ``calls``, ``dump``, ``log``, ``record``, ``report``,
``reproducibility``, ``ring``, ``statistics``, ``utils``, ``verdict`` and ``watch``.
"""
