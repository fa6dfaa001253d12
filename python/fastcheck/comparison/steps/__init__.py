"""One step of one rank: its pairs are measured, judged and added to the tally.

In the order of the data flow: ``course`` has what the steps go by and hand on; ``pairs`` has what
is found of each pair, and ``step`` what a step knows besides. ``values`` measures them. ``judging``
judges them, and leaves to ``noise`` what rounding explains and to ``schedule`` what another order
of computation does. ``outcome`` adds them to the tally. ``trace`` finds the first tensor with other
bits, what it leads to, and its cause in the step before it.

Imports ``comparison``, ``log``, ``record`` and ``statistics``.
"""
