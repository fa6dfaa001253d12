"""The data that advice is derived from, and the form of one piece of advice."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fastcheck.record.event import WHEN_LAST_READ
from fastcheck.record.format import Verdict
from fastcheck.record.statistics import RecordStatistics
from fastcheck.report.trend import BLOWN_UP, Trend
from fastcheck.utils.text.numbers import format_number

if TYPE_CHECKING:
    from fastcheck.record.site import Site
    from fastcheck.report.stop_report import StopReport

#: Modules of torch, and operators, that add products up.
_SUMS = re.compile(
    r"Linear|Bilinear|Conv(?:Transpose)?[123]d|linear|(?:add|b|baddb)?mm|(?:add)?mv|matmul|dot"
    r"|convolution|conv[123]d"
)
#: Modules of torch that take no logarithm or root of what they are given, nor divide by it.
_SAFE = re.compile(
    r"(?:Layer|Group|RMS|SyncBatch|Batch|Instance)Norm(?:[123]d)?|(?:LSTM|GRU|RNN)(?:Cell)?"
    r"|ReLU|GELU|SiLU|Tanh|Sigmoid|Dropout|MultiheadAttention|Softmax"
)
#: Operators that divide, or whose domain ends somewhere.
_DOMAINS = re.compile(
    r"log(?:2|10|1p|it)?|r?sqrt|pow|float_power|(?:true_)?divide|div|reciprocal|remainder|fmod"
    r"|a(?:cos|sin|tan)h|acos|asin|lgamma|digamma|xlogy|special_xlog1py"
)

#: Optimizers that divide by no moment and have no eps.
_WITHOUT_EPS = frozenset({"SGD", "ASGD", "Rprop", "LBFGS", "Lion"})


@dataclass(frozen=True)
class Advice:
    """One thing to try; ``code``, if any, is shown on lines of its own. ``is_kept``: where room is
    short, it is shown rather than those before it.
    """

    text: str
    code: str = ""
    is_kept: bool = False


#: Advice on a target of kl_div() that is below 0, of which it makes NaN.
OF_LOG_TARGET = Advice(
    "If the target of kl_div holds log-probabilities, pass log_target=True. If not, "
    "give it probabilities: numbers below 0 have no logarithm.",
    "F.kl_div(log_p, log_q, log_target=True)",
)


@dataclass(frozen=True)
class Operation:
    """The operator that made the numbers. ``name``: in lower case, without what tells overloads and
    kernels apart (``div`` of ``aten.div_.Tensor`` and of ``DivBackward0``); ``shown``: as the
    report names it. ``inputs``: what it read, by argument; ``origins``: the operators that made
    these, where known. ``result``: None where it was not held. ``is_open``: not all that it read
    was held, so that NaN or Inf may have been in it.
    """

    name: str
    shown: str
    is_backward: bool
    inputs: tuple[tuple[str, RecordStatistics], ...] = ()
    origins: Mapping[str, str] = field(default_factory=dict)
    result: RecordStatistics | None = None
    is_open: bool = False

    @property
    def is_op(self) -> bool:
        """True if it is an operator whose inputs were all read, as far as they can hold a NaN."""
        return self.shown.startswith("aten.")

    @property
    def reads_integers(self) -> bool:
        """True if it is such an operator and read no tensor that can hold a NaN."""
        return self.is_op and not self.inputs and self.result is not None

    @property
    def is_nan(self) -> bool:
        return self.result is not None and self.result.nan_count > 0

    @property
    def may_be_nan(self) -> bool:
        return self.result is None or self.result.nan_count > 0

    @property
    def may_be_inf(self) -> bool:
        return self.result is None or self.result.inf_count > 0

    @property
    def has_domain(self) -> bool:
        """True if it divides, or takes logarithms or roots."""
        return bool(_DOMAINS.fullmatch(self.name))

    @property
    def is_arithmetic(self) -> bool:
        """True if an infinity that it has made has left a range: a mask, or another number that is
        written, leaves none.
        """
        return not (self.has_domain or self.writes)

    @property
    def writes(self) -> bool:
        """True if it puts numbers in their places that it was given."""
        return re.search("where|full|fill|pad|scatter|put|copy", self.name) is not None

    @property
    def is_of_zeros(self) -> bool:
        """True if one operand has as many zeros as there are bad results, which growth made not."""
        bad = 0 if self.result is None else self.result.nonfinite_count
        return bad > 0 and any(reading.zero_count == bad for _, reading in self.inputs)

    @property
    def is_at_zero(self) -> bool:
        """True if it divides by 0 or the like, or its derivative does."""
        return self.is_of_zeros or (self.is_backward and self.has_zero)

    @property
    def has_zero(self) -> bool:
        return any(reading.zero_count for _, reading in self.inputs)

    def is_inverse_of(self, read: RecordStatistics) -> bool:
        """True if the zeros that it read may have become infinities: those of x ** 2 stay zeros."""
        return read.zero_count > 0 and (
            self.result is None or self.result.zero_count < read.zero_count <= self.result.inf_count
        )

    def operand(self, place: int) -> tuple[str, RecordStatistics | None]:
        """The argument at this place, by the names that torch's operators give them."""
        named = (("self", "input", "log_probs"), ("other",), ("tensor2",))[place]
        for label, reading in self.inputs:
            if label.partition(" ")[0] in named:
                return label, reading
        return "", None


@dataclass(frozen=True)
class Case:
    """The data that the rules of advice read: the report, and what is derived from it."""

    report: StopReport
    site: Site
    reading: RecordStatistics
    verdict: Verdict
    #: The reason of the verdict.
    reason: str
    trend: Trend
    inputs: tuple[tuple[Site, RecordStatistics], ...]
    #: The inputs of the module as they were in an earlier step; None if they are not held.
    inputs_before: tuple[RecordStatistics | None, ...]
    operation: Operation | None
    #: A bad value that came into the loss without a graph, and the line that assigned it.
    outside: str
    #: The tensor without a graph in which the loss read it, under whatever name.
    outside_reading: RecordStatistics | None
    source: str
    #: Places that may have made it, each with its source.
    written: tuple[str, ...]

    @property
    def kind(self) -> str:
        """The module's type and the operator in lower case, to recognise attention and norms. The
        path is no evidence: ``self_attn.o_proj.lora_b`` takes no softmax.
        """
        is_maker = self.site.role != "input" or self.site.op
        return f"{self.site.module_type if is_maker else ''} {self.site.op or self.op_name}".lower()

    @property
    def is_density(self) -> bool:
        """True if what made it is, or may be, within ``log_prob()`` of a distribution."""
        made = self.report.made_by
        return made is not None and ".log_prob(" in " ".join(
            (made.variable, made.line, *made.written)
        )

    @property
    def rates(self) -> str:
        """The learning rates of the optimizers' groups, as a clause in brackets."""
        named = ", ".join(
            f"{name}: {format_number(rate)}" for name, rate in self.report.learning_rates
        )
        return f" (it is now {named})" if named else ""

    @property
    def searches(self) -> bool:
        """True if an optimizer evaluates the loss several times for an update."""
        return any(name == "LBFGS" for name, _ in self.report.learning_rates)

    @property
    def divider(self) -> str:
        """The first optimizer that has an eps, Adam where none is known; empty: none has an eps."""
        names = [name for name, _ in self.report.learning_rates] or ["Adam"]
        return next((name for name in names if name not in _WITHOUT_EPS), "")

    @property
    def op_name(self) -> str:
        """``"div"`` of ``"aten.div_.Tensor"``; empty where no operator is known."""
        return "" if self.operation is None else self.operation.name

    @property
    def is_sum_of_products(self) -> bool:
        if self.op_name:
            return bool(_SUMS.fullmatch(self.op_name))
        return bool(_SUMS.fullmatch(self.site.module_type)) and self._may_overflow

    @property
    def _may_overflow(self) -> bool:
        """True if a sum of products of what was read may leave the format. A class of a library
        may be called Linear and do more than that.
        """
        weights = [(float(r.abs_max or 0), r.numel) for s, r in self.inputs if s.role == "param"]
        form, peak = self.reading.float_format, self.input_abs_max
        if form is None or peak is None or not weights:
            return not self.inputs
        return any(largest * (peak * numel + 1) > form.max for largest, numel in weights)

    @property
    def has_old_weights(self) -> bool:
        """True if the module's weights may have been written since they were read."""
        return self.operation is None and WHEN_LAST_READ in self.reason

    @property
    def has_domain(self) -> bool:
        """True if what made it may divide, or take logarithms or roots, as far as is known."""
        if self.operation is not None:
            return self.operation.has_domain
        return not self.is_sum_of_products and not _SAFE.fullmatch(self.site.module_type)

    @property
    def is_narrow(self) -> bool:
        form = self.reading.float_format
        return form is not None and form.is_narrow

    @property
    def has_run_away(self) -> bool:
        """True if it grew so far that an overflow may have come of it: a few doublings lead to none
        in a wide format.
        """
        return self.trend.has_exploded or (self.is_narrow and self.trend.has_grown)

    @property
    def limit(self) -> str:
        form = self.reading.float_format
        return format_number(form.max) if form is not None else "?"

    @property
    def overflows_to_nan(self) -> bool:
        """True if the format has no Inf (float8_e4m3fn), so that values that are too large become
        NaN.
        """
        form = self.reading.float_format
        return form is not None and not form.has_inf

    @property
    def has_nan(self) -> bool:
        return self.reading.nan_count > 0

    @property
    def only_neginf(self) -> bool:
        return self.reading.nonfinite_count == self.reading.neginf_count

    @property
    def read_inputs(self) -> list[tuple[Site, RecordStatistics]]:
        """The activations that the module read: neither parameters nor integers (labels, indices),
        which no computation makes non-finite.
        """
        return [
            (s, r)
            for s, r in self.inputs
            if s.role not in ("param", "buffer") and r.float_format is not None
        ]

    @property
    def news(self) -> list[tuple[Site, RecordStatistics, RecordStatistics | None]]:
        """``read_inputs``, each with its last healthy record; None if there is none in memory."""
        before = dict(zip([id(r) for _, r in self.inputs], self.inputs_before))
        return [(s, r, before.get(id(r))) for s, r in self.read_inputs]

    @property
    def broken_weight(self) -> tuple[Site, RecordStatistics, RecordStatistics] | None:
        """The parameter of the module that the update before this step has blown up, as it is and
        as it was.
        """
        for (site, now), before in zip(self.inputs, self.inputs_before):
            if site.role != "param" or before is None or before.step >= self.report.step:
                continue
            if not now.abs_max or not before.abs_max:
                continue
            if now.abs_max >= BLOWN_UP * before.abs_max and now.abs_max > 1:
                return site, now, before
        return None

    @property
    def input_abs_max(self) -> float | None:
        magnitudes = [float(r.abs_max) for _, r in self.read_inputs if r.abs_max is not None]
        return max(magnitudes, default=None)

    def is_like(self, *words: str) -> bool:
        return any(word in self.kind for word in words)


def least_magnitude(reading: RecordStatistics) -> float:
    """The smallest magnitude; 0: not known, or of numbers of both signs."""
    if reading.min is None or reading.max is None or reading.nonfinite_count:
        return 0.0
    return float(max(reading.min, -reading.max, 0))


def down_to(reading: RecordStatistics) -> str:
    """Names the smallest number, if it is known."""
    return "" if reading.min is None else f" (down to {format_number(reading.min)})"
