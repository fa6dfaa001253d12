"""The operator that made the numbers of a stop, its line, and the variable that holds them.

``makers`` asks in turn: the graph of the loss (``loss_graph``), what is kept of it once backward
has passed (``kept_graph``), and a module's call that is run again (``call_again``, with
``second_run`` and ``stand_ins``). ``graph_nodes`` and ``made_again`` serve the graphs.
``variables``, ``local_variables``, ``assignments`` and ``written_lines`` find the line and the
variable. ``update_state`` reads what an optimizer keeps of a weight that its update has broken.

Imports ``calls``, ``monitor``, ``monitor.hooks``, ``monitor.session``, ``record``, ``report``,
``statistics``, ``utils`` and ``verdict``.
"""
