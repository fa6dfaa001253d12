"""Event: a non-finite record with its verdict and the reason for it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fastcheck.notebook import block_html, fields_html, guarded_html
from fastcheck.record.format import DTYPES, Depth, Verdict, extremes
from fastcheck.record.site import Site

#: The beginning of the reason for an input that the program computed outside of the modules.
COMPUTED_OUTSIDE = "it was computed"
#: The beginning for a tensor that functional_call() has put in the place of a parameter.
GIVEN_INSTEAD = "functional_call() was given it"
#: The name of the target of kl_div(), where it has numbers below 0.
TARGET_OF_KL = "target of kl_div"
#: The end for what an operator has made of finite tensors and such a number.
GIVEN_NUMBER = " but for a number that it was given, which is NaN or infinite"
#: The result of an operator, of which not all that it read is held.
KNOWN_ALONE = "whose result is known not to be finite"
#: The end of a clause on parameters that may have been written before what read them.
WHEN_LAST_READ = "when they were last read"
#: The beginning for a stored tensor that was not finite at first.
NEVER_FINITE = "it was non-finite when it was first read"
#: The reason for numbers of which nothing that counts was made.
UNUSED = "nothing that is stored, or that left the computation, was computed from it"
#: The beginning for a gradient that the training loop has changed.
CHANGED_BY_LOOP = "it was finite when backward() ended"
#: A part of it for a gradient that was read after the training loop had changed gradients.
MAYBE_CHANGED = "the training loop changed gradients between backward() and the update"
#: The end for a gradient of a step in which no backward was seen.
WRITTEN_BY_LOOP = "the program may have written this gradient"
#: The end for a parameter that the program itself has written.
NOT_UPDATED = "no optimizer that has stepped holds it"
#: The same, of a step in which none has stepped.
NOT_STEPPED = "no optimizer has stepped since"


@dataclass(frozen=True)
class Event:
    """A non-finite record with its verdict.

    ``site`` is the place that produced the value. It differs from the record's own site for a
    gradient: the hook is on the tensor that one module made, and the gradient may have been
    computed by the module that read the tensor. ``record`` is a copy (a scalar of RECORD_DTYPE).
    ``counted``: it counts against overflow_nums."""

    site: Site
    record: np.void
    step: int
    verdict: Verdict
    reason: str
    counted: bool
    rank: int = 0
    # The line of Python that called the operator, at op level: "train.py:12 in forward".
    line: str = ""
    # The call of torch's Python API that made it, where those are numbered (fastcheck.compat):
    # "Functional.linear.145", in backward that of the forward.
    api: str = ""
    # The operator's arguments by name at op level, each with the sequence number of its record.
    inputs: tuple[tuple[str, int], ...] = ()

    def _repr_html_(self) -> str:
        """HTML for notebooks: the place, the record's numbers, and the reason. Never raises."""
        return guarded_html(self, lambda: _event_html(self))


def _event_html(event: Event) -> str:
    record = event.record
    is_known = int(record["numel"]) > 0 and int(record["depth"]) >= Depth.STATS
    low, high = extremes(record) if is_known else (None, None)
    fields: list[tuple[str, object]] = [
        ("step", event.step),
        ("rank", event.rank or None),
        ("counted", bool(event.counted)),
        ("dtype", DTYPES[int(record["dtype"])].name),
        ("elements", int(record["numel"])),
        ("NaN", int(record["nan_count"])),
        ("+Inf", int(record["posinf_count"])),
        ("-Inf", int(record["neginf_count"])),
        # Nothing finite is left where they have changed places.
        ("min", low if low is not None and high is not None and low <= high else None),
        ("max", high if low is not None and high is not None and low <= high else None),
        ("reason", event.reason),
        ("line", event.line),
        ("API", event.api),
        ("inputs", ", ".join(name for name, _ in event.inputs)),
    ]
    return block_html(f"{event.verdict.name.lower()}: {event.site}", fields_html(fields))
