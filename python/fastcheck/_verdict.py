"""The verdict: from where a non-finite record stands to origin, arrived, propagated, unresolved or
scaled.

One Judge lives for one step. Forward records are judged by provenance: what the module read, and
what was made inside it. Gradients are judged in the order in which autograd makes them: the first
non-finite one has only finite ones behind it, so it is the origin, and the later ones are taken to
follow from it. Nothing here reads a tensor.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Callable, Optional

from ._blame import blame
from ._calls import Call, CallLog, ModuleNode
from ._finding import Event, Finding
from ._record import Verdict
from ._site import SiteTable

__all__ = ["Event", "Finding", "Judge"]


class Judge:
    """Gives the findings of one step their verdicts.

    ``masks`` holds the numbers of sites whose -Inf did no harm in an earlier step;
    ``check_parameters`` reads a module's parameters now and returns a non-finite one. Every finding
    whose verdict was decided or changed is put in ``changed`` for the caller to take.
    """

    def __init__(
        self,
        sites: SiteTable,
        masks: set[int],
        calls: CallLog,
        check_parameters: Callable[[ModuleNode, Finding], Optional[Finding]],
        last_finite_step: Callable[[int], Optional[int]],
        has_other_ranks: bool = False,
    ) -> None:
        self.findings: list[Finding] = []
        self.changed: list[Finding] = []
        self._sites = sites
        self._masks = masks
        self._calls = calls
        self._check_parameters = check_parameters
        self._last_finite_step = last_finite_step
        self._has_other_ranks = has_other_ranks
        self._by_token: dict[int, Finding] = {}

    # Forward

    def batch(self, finding: Finding, since: int, is_data: bool, excluded: bool) -> None:
        """What enters an outermost module. ``is_data``: it can't have been computed in this step;
        ``since``: the sequence number at which the last pass through the module ended, what enters
        it now can only follow from later ones.
        """
        self._add(finding)
        earlier = next((f for f in self.findings[:-1] if f.is_hard and f.position >= since), None)
        if is_data or earlier is None:
            reason = "it came in with the batch: no observed module made it"
            if not is_data:
                where = "in an excluded module, or outside" if excluded else "outside"
                reason = (
                    f"it was computed {where} the observed modules, and nothing observed before it "
                    "was non-finite"
                )
            self._arrive_or_wait(finding, reason)
        else:
            self._propagate(finding, earlier)

    def inner_input(self, finding: Finding, parent: Call, after_gap: bool) -> None:
        """What a submodule reads, and no observed module made: computed in the parent's own
        code.
        """
        self._add(finding)
        related = self._related(parent, finding)
        name = parent.node.name
        verdict = Verdict.ORIGIN
        reason = f"{name}.forward computed it between its submodules, from finite values"
        if parent.node.has_excluded_parts:
            verdict = Verdict.ARRIVED
            reason = f"no observed module made it: {name} contains modules that are excluded"
        elif after_gap:
            verdict = Verdict.ARRIVED
            reason = (
                f"no observed module made it: either {name}.forward computed it between its "
                "submodules, or it was kept from a step that every= skipped"
            )
        related += [f for f in self.findings[:-1] if f.is_hard and not f.is_gradient][:1]
        self._judge_forward(finding, related, None, parent.node, verdict, reason)

    def recomputed(self, finding: Finding, call: Call) -> None:
        """What activation checkpointing computed again, in backward: no news, its first run was
        judged.
        """
        self._add(finding)
        reason = (
            f"{call.node.name} was recomputed in backward (activation checkpointing): its first "
            "run counts"
        )
        if finding.only_neginf:
            finding.hold(Verdict.UNRESOLVED, reason, Verdict.PROPAGATED, reason)
            self.changed.append(finding)
        else:
            self._decide(finding, Verdict.PROPAGATED, reason)

    def output(self, finding: Finding, call: Call) -> None:
        """What a module returned."""
        self._add(finding)
        related = self._related(call, finding)
        reason = f"everything that {call.node.name} read was finite, its parameters too"
        soft = [f for f in related if f.is_soft]
        if soft:
            what = "a NaN" if finding.has_nan else "something other than -Inf"
            reason = (
                f"{call.node.name} made {what} where it read only finite values and -Inf "
                "(a row that is masked entirely does this)"
            )
        self._judge_forward(finding, related, call.node, call.node, Verdict.ORIGIN, reason)

    def call_ended(self, call: Call, is_finite: bool) -> None:
        """All outputs of the call were read. If they are finite, the -Inf that it read did no
        harm.
        """
        if is_finite:
            for finding in self._related(call, None):
                if finding.is_soft:
                    finding.is_absorbed = finding.root.is_absorbed = True

    def loss(self, finding: Finding) -> None:
        """The loss as monitor.step(loss=) was given it; -Inf is no mask here."""
        self._add(finding)
        hard = self._first_hard()
        soft = self._promotable(self.findings[:-1])
        if hard is not None:
            self._propagate(finding, hard)
        elif soft is not None:
            self._promote(soft, finding)
        else:
            self._decide(
                finding,
                Verdict.ORIGIN,
                "every tensor observed in this step was finite: the loss itself overflowed",
            )

    def known_loss(self, token: int) -> None:
        """The loss is a tensor that was read before (the criterion's output). As a loss, -Inf is no
        mask.
        """
        finding = self._by_token.get(token)
        if finding is not None and finding.is_soft:
            root = finding.root
            root.release()
            self.changed.append(root)
            if finding is not root:
                self._propagate(finding, root)

    # Parameters and buffers

    def parameter(self, finding: Finding, asked_for: Optional[Finding]) -> None:
        """A parameter or buffer. ``asked_for``: what made us look at it, None when all are read."""
        self._add(finding)
        if asked_for is not None:
            finding.position = asked_for.position
        last_finite = self._last_finite_step(finding.site)
        if asked_for is None:
            earlier = self._first_hard()
        else:
            earlier = next(
                (f for f in self.findings if f.is_hard and f.role in ("param", "buffer")), None
            )
        if earlier is not None:
            self._propagate(finding, earlier)
            return
        if last_finite is None:
            reason = (
                "it was non-finite when it was first read: look at the checkpoint or at the "
                "initialisation"
            )
        else:
            reason = (
                f"it was finite just before the update of step {last_finite}, and is not any more"
            )
        is_infinite_buffer = finding.role == "buffer" and not finding.has_nan
        if finding.is_mask or (is_infinite_buffer and asked_for is None):
            finding.hold(
                Verdict.UNRESOLVED,
                "a stored infinity, probably written on purpose",
                Verdict.ARRIVED,
                reason,
            )
            self.changed.append(finding)
        else:
            self._decide(finding, Verdict.ARRIVED, reason)

    def parameter_gradient(self, finding: Finding, scaled: bool) -> None:
        """A parameter's gradient, just before the optimizer uses it."""
        self._add(finding)
        earlier = self._first_hard() or self._first_scaled()
        verdict, how = Verdict.ORIGIN, "overflowed while it was computed or accumulated"
        if self._has_other_ranks:
            verdict, how = Verdict.ARRIVED, f"came with the reduction over the ranks, or {how}"
        reason = (
            "every activation and every gradient observed in this step was finite: this gradient "
            + how
        )
        self._judge_gradient(finding, earlier, verdict, reason, scaled)

    # Backward

    def gradient(self, finding: Finding, token: int, scaled: bool) -> None:
        """The gradient of the tensor with this token."""
        self._add(finding)
        earlier = self._first_hard() or self._first_scaled()
        if earlier is not None:
            self._judge_gradient(finding, earlier, Verdict.PROPAGATED, "", scaled)
            return
        reader, reason = blame(finding, token, self._calls, self._sites)
        if not scaled:
            soft = self._promotable(self._made_in(reader) if reader else self.findings[:-1], reader)
            if soft is not None:
                self._promote(soft, finding)
                return
        self._judge_gradient(finding, None, Verdict.ORIGIN, reason, scaled)

    # The end of the step

    def settle_scaled(self, skipped: bool) -> Optional[Finding]:
        """The scaler has decided. Skipped: the scaled gradients did no harm; the first of them is
        returned.
        """
        first = None
        for finding in self.findings:
            if finding.verdict is Verdict.SCALED and finding.planned is not None:
                if not skipped:
                    finding.release()
                    self.changed.append(finding)
                first = first or finding
                finding.planned = None
        return first if skipped else None

    def settle_silent(self) -> None:
        """Nothing non-finite stays silent: without an origin, the first one counts."""
        hard = self._first_hard()
        has_origin = any(f.verdict in (Verdict.ORIGIN, Verdict.ARRIVED) for f in self.findings)
        if hard is not None and not has_origin:
            self._decide(
                hard,
                Verdict.ARRIVED,
                "the step has non-finite values, and no observed module began them",
            )

    def settle(self) -> None:
        """The step is over: from now on it is known which -Inf did no harm."""
        self.settle_silent()
        if self._first_hard() is None:
            self._masks.update(f.site for f in self.findings if f.is_soft)

    def process_overflow(self, finding: Finding, reason: str) -> None:
        """A saturating device says that something overflowed, and no tensor of the step shows it:
        values inside an operator, or a NaN that became 0. A mask that is added does it too.
        """
        self._add(finding)
        self._decide(
            finding,
            Verdict.ABSORBED,
            f"{reason}: its overflow status was set, and no output or gradient that was read shows "
            "where",
        )

    def overdue(self, finding: Finding, skipped_steps: int) -> None:
        """Loss scaling has skipped so many steps in a row that it will not recover by itself."""
        self._decide(
            finding,
            Verdict.ORIGIN,
            f"{skipped_steps} steps in a row were skipped by loss scaling: the gradients overflow "
            "at any scale",
        )

    def is_finding(self, token: int) -> bool:
        """Whether the tensor with this token is non-finite."""
        return token in self._by_token

    @property
    def has_held_gradients(self) -> bool:
        """Whether scaled gradients still wait for what the scaler decides."""
        return any(f.verdict is Verdict.SCALED and f.planned is not None for f in self.findings)

    # Shared

    def _add(self, finding: Finding) -> None:
        self.findings.append(finding)
        self._by_token[finding.seq] = finding

    def _related(self, call: Call, besides: Optional[Finding]) -> list[Finding]:
        """What was non-finite among the call's inputs, and what was made inside it until now."""
        read = [self._by_token[token] for token in call.inputs if token in self._by_token]
        made = [
            f
            for f in self.findings
            if f.position >= call.first_seq and f.thread == call.thread and not f.is_gradient
        ]
        return [f for f in read + made if f is not besides]

    def _made_in(self, call: Optional[Call]) -> list[Finding]:
        if call is None:
            return []
        return [f for f in self.findings if f.call is call or (f.call and f.call.parent is call)]

    def _judge_forward(
        self,
        finding: Finding,
        related: list[Finding],
        reader: Optional[ModuleNode],
        owner: ModuleNode,
        verdict: Verdict,
        reason: str,
    ) -> None:
        hard = next((f for f in related if f.is_hard), None)
        if hard is not None:
            self._propagate(finding, hard)
            return
        soft = [f for f in related if f.is_soft]
        if finding.only_neginf:
            finding.hold(Verdict.UNRESOLVED, finding.mask_reason, verdict, reason)
            finding.cause = soft[0] if soft else None
            self.changed.append(finding)
            return
        harmful = None if reader is not None and reader.is_softmax_like else self._promotable(soft)
        if harmful is not None:
            self._promote(harmful, finding)
            return
        parameter = self._check_parameters(owner, finding)
        if parameter is not None:
            self._propagate(finding, parameter)
        else:
            self._decide(finding, verdict, reason)

    def _judge_gradient(
        self,
        finding: Finding,
        earlier: Optional[Finding],
        verdict: Verdict,
        reason: str,
        scaled: bool,
    ) -> None:
        if earlier is not None:
            verdict, reason = Verdict.PROPAGATED, self._follows(earlier)
        if scaled and (earlier is None or earlier.verdict is Verdict.SCALED):
            finding.hold(
                Verdict.SCALED,
                "a scaled gradient; loss scaling decides what becomes of it",
                verdict,
                reason,
            )
            finding.cause = earlier
            self.changed.append(finding)
        else:
            self._decide(finding, verdict, reason, earlier)

    def _arrive_or_wait(self, finding: Finding, reason: str) -> None:
        if finding.only_neginf:
            finding.hold(Verdict.UNRESOLVED, finding.mask_reason, Verdict.ARRIVED, reason)
            self.changed.append(finding)
        else:
            self._decide(finding, Verdict.ARRIVED, reason)

    def _promotable(
        self, candidates: Iterable[Finding], made_by: Optional[Call] = None
    ) -> Optional[Finding]:
        """The first unresolved -Inf that may have done harm; not one that is a mask or was
        absorbed.

        The backward of the very module that made a -Inf is harmed by it even if later modules
        absorbed it.
        """
        for finding in candidates:
            root = finding.root
            if not finding.is_soft or root.is_mask or root.site in self._masks:
                continue
            if made_by is None and (finding.is_absorbed or root.is_absorbed):
                continue
            return root
        return None

    def _promote(self, soft: Finding, by: Finding) -> None:
        parameter = (
            self._check_parameters(soft.call.node, soft)
            if soft.role == "output" and soft.call
            else None
        )
        if parameter is not None:
            self._propagate(soft, parameter)
            self._propagate(by, soft)
            return
        soft.release()
        soft.reason += f"; its -Inf did harm: {self._sites[by.site]} is non-finite too"
        self.changed.append(soft)
        self._propagate(by, soft)

    def _propagate(self, finding: Finding, cause: Finding) -> None:
        self._decide(finding, Verdict.PROPAGATED, self._follows(cause), cause)

    def _follows(self, cause: Finding) -> str:
        return f"it follows from {self._sites[cause.blamed_site]}"

    def _decide(
        self, finding: Finding, verdict: Verdict, reason: str, cause: Optional[Finding] = None
    ) -> None:
        finding.decide(verdict, reason, cause)
        self.changed.append(finding)

    def _first_hard(self) -> Optional[Finding]:
        return next((f for f in self.findings if f.is_hard), None)

    def _first_scaled(self) -> Optional[Finding]:
        return next((f for f in self.findings if f.verdict is Verdict.SCALED), None)
