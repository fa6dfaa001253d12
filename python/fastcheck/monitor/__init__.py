"""``install()`` and the Monitor it returns.

Its rooms, from the bottom: ``weights`` (weights that do not move) and ``distributed``; ``session``
(one monitor at work); ``loop`` (facts of a training loop); ``precision`` (exponent counts);
``sinks`` (scalars for trackers); ``hooks`` (hooks on torch); ``op_level``; ``named_tensors``
(``observe()``); ``on_request`` (op level or a dump for some steps of a running program); ``reruns``
(the same step several times); ``origin`` (the operator that made the numbers of a stop). Above them
``watching`` (``monitor.watch``), ``replay``, ``ended`` (an exception of the program's own);
``core``, which makes all parts; ``showing`` (what a Monitor shows), ``monitor``, ``install``,
``rerun``, ``next_steps`` (a log of the steps that follow) and ``auto_install``.

Imports ``backends``, ``calls``, ``dump``, ``log``, ``record``, ``report``,
``reproducibility``, ``ring``, ``statistics``, ``utils``, ``verdict`` and ``watch``.
"""
