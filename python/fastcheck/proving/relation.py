"""Relation: one way to compute a step that must agree with the step as it is."""

from __future__ import annotations

import contextlib
from typing import Any

from .case import TestedStep
from .computed import Computed


class Relation:
    """A way to compute a training step that must agree with the step as it is. A subclass
    overrides what it needs, and is given to ``fastcheck.prove(relations=[...])``::

        class MyKernel(fastcheck.Relation):
            name = "my attention against torch's"

            def changed(self, case):
                return unittest.mock.patch.object(my_model, "attention", reference_attention)

    Attributes:
        name: what the table calls it.
        kinds: what is compared, of ``"loss"``, ``"output"`` (of the model), ``"gradient"`` and
            ``"update"``.
        measured: the kinds that a healthy loss may not agree in; if they alone differ the step
            depends on the batch by design.
        mixes_rows: rows are computed in another order or company.
        is_exact: computed is the very same. A step that differs then may differ by itself, which
            is not to count as its noise.
        reduces: gradients of parameters are reduced after they were computed.
        draws_alike: the same random numbers are drawn for the same elements. If not, dropout is
            left out, and a step that draws other random numbers is not asked.
    """

    name = ""
    kinds: tuple[str, ...] = ("loss", "output", "gradient")
    measured: tuple[str, ...] = ()
    mixes_rows = False
    is_exact = False
    reduces = False
    draws_alike = True

    def why_not(self, case: TestedStep) -> str:
        """The reason why the relation can't be asked of this step, or ``""``."""
        return ""

    def by_design(self, case: TestedStep) -> str:
        """The reason why this step may depend on what the relation changes, or ``""``."""
        return ""

    def changed(self, case: TestedStep) -> contextlib.AbstractContextManager[Any]:
        """A context in which the model, or torch, computes in another way. It is undone at its
        end.
        """
        return contextlib.nullcontext()

    def batch(self, case: TestedStep) -> Any:
        """The batch in its other form; see ``case.map_batch`` and ``case.take_rows``."""
        return case.map_batch(lambda _, tensor: tensor.detach().clone())

    def back(self, case: TestedStep, computed: Computed) -> Computed:
        """The results of the computation in the form of the step as it is. The tensors whose keys
        are in ``computed.rows`` have the rows of the batch in their first dimension.
        """
        return computed

    def reference(self, case: TestedStep, base: Computed, sites: bool = False) -> Computed:
        """The part of the step as it is that ``back()`` returns."""
        return base

    def note(self, case: TestedStep) -> str:
        """A note that is shown beside the score."""
        return ""

    def run(self, case: TestedStep, base: Computed, sites: bool = False) -> Computed:
        """The computation, in the form of ``base``, the step as it is."""
        with self.changed(case):
            return self.back(case, case.compute(self.batch(case), sites=sites))
