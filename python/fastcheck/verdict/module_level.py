"""The verdict at module level: whether a non-finite record is the origin, arrived from outside, was
propagated, is unresolved (-Inf alone) or scaled.

One Judge lives for one step. Forward records are judged by provenance: what the module read, and
what was computed inside it. Gradients are in ``gradient_judge.py``. Nothing here reads a tensor."""

from __future__ import annotations

from typing import Callable, Optional

from fastcheck.calls.module_calls import Call, CallLog, ModuleNode
from fastcheck.record.format import Verdict
from fastcheck.record.site import SiteTable

from .finding import Finding
from .gradient_judge import CheckParameters, GradientJudge
from .pending import in_order

__all__ = ["Judge", "was_finite"]


def was_finite(role: str, step: int) -> str:
    """Why a stored tensor, last seen finite in ``step``, is an event."""
    when = "when it was read in" if role == "buffer" else "just before the update of"
    return f"it was finite {when} step {step}, and is not any more"


class Judge(GradientJudge):
    """Gives the findings of one step their verdicts."""

    def __init__(
        self,
        sites: SiteTable,
        masks: set[int],
        calls: CallLog,
        check_parameters: CheckParameters,
        last_finite_step: Callable[[int], Optional[int]],
        has_other_ranks: bool = False,
    ) -> None:
        super().__init__(sites, masks, calls, check_parameters, has_other_ranks)
        self._last_finite_step = last_finite_step

    # Forward

    def batch(
        self, finding: Finding, since: int, is_data: bool, excluded: bool, needs_gradient: bool
    ) -> None:
        """What enters an outermost module. ``is_data``: it can't have been computed in this step;
        ``since``: the sequence number at which the last pass through the module ended, what enters
        it now can only follow from later ones. ``needs_gradient``: as activations do that another
        rank has sent.
        """
        self._add(finding)
        finding.is_data = is_data and not needs_gradient
        earlier = next(
            (f for f in self.findings[:-1] if f.is_confirmed and f.position >= since), None
        )
        if is_data or earlier is None:
            reason = "it came in with the batch: no observed module made it"
            if not is_data:
                where = "in an excluded module, or outside" if excluded else "outside"
                reason = (
                    f"it was computed {where} the observed modules, and nothing observed before it "
                    "was non-finite"
                )
            if finding.only_neginf or (is_data and not finding.is_saturated):
                # A model may impute what is missing: what it makes of it decides.
                waits = finding.mask_reason if finding.only_neginf else "it came in with the batch"
                finding.hold(Verdict.UNRESOLVED, waits, Verdict.ARRIVED, reason)
                self.changed.append(finding)
            else:
                self._decide(finding, Verdict.ARRIVED, reason)
        else:
            self._propagate(finding, earlier)

    def inner_input(self, finding: Finding, parent: Call, after_gap: bool) -> None:
        """An input of a submodule that no observed module returned: the parent's own code computed
        it.
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
        earlier = [f for f in self.findings[:-1] if not f.is_gradient]
        related += [f for f in earlier if f.is_confirmed][:1]
        related += [f for f in earlier if f.is_pending and not f.is_absorbed][:1]
        self._judge_forward(finding, related, None, parent.node, verdict, reason)

    def recomputed(self, finding: Finding, call: Call) -> None:
        """A tensor that activation checkpointing computed again in backward; its first run was
        judged.
        """
        self._add(finding)
        reason = (
            f"{call.node.name} was recomputed in backward (activation checkpointing): its first "
            "run counts"
        )
        first = self._before_recompute(finding)
        if finding.only_neginf:
            finding.hold(Verdict.UNRESOLVED, reason, Verdict.PROPAGATED, reason)
            self.changed.append(finding)
        elif first is not None and first.is_pending:
            self.pend(finding, Verdict.PROPAGATED, reason, first.root)
        else:
            self._decide(finding, Verdict.PROPAGATED, reason)

    def _before_recompute(self, finding: Finding) -> Optional[Finding]:
        """What was found in the same call before it was recomputed."""
        call = finding.record["call"]
        same = (f for f in self.findings if f.site == finding.site and f.record["call"] == call)
        return next((f for f in same if f is not finding), None)

    def output(self, finding: Finding, call: Call) -> None:
        """An output of a module."""
        self._add(finding)
        related = self._related(call, finding)
        reason = f"everything that {call.node.name} read was finite, its parameters too"
        if call.node.has_unread_parts:
            reason = (
                f"all that was observed of what {call.node.name} read was finite; it contains "
                "modules that are not observed"
            )
        tentative = [f for f in related if f.is_tentative]
        verdict = Verdict.ORIGIN
        if self._has_other_ranks and call.node.is_collective:
            verdict = Verdict.ARRIVED
            reason = (
                f"everything that {call.node.name} read on this rank was finite: it came with the "
                "statistics of the other ranks, or overflowed there"
            )
        if tentative:
            what = "a NaN" if finding.has_nan else "something other than -Inf"
            place = self._sites[tentative[0].root.blamed_site]
            reason = f"{call.node.name} made {what} where it read only finite values and "
            if all(one.only_neginf for one in tentative):
                reason += f"the -Inf of {place} (a row that is masked entirely does this)"
            else:
                reason += f"some that did no harm until then: {place}"
        self._judge_forward(finding, related, call, call.node, verdict, reason)

    def call_ended(self, call: Call, is_finite: bool) -> None:
        """All outputs of the call were read. If they are finite, the -Inf that it read did no
        harm.
        """
        if is_finite:
            for finding in self._related(call, None):
                if finding.is_tentative:
                    finding.is_absorbed = True
                    if not finding.is_pending:
                        finding.root.is_absorbed = True

    def pass_ended(self, call: Call, is_complete: bool, ended_by: str) -> None:
        """An outermost call is over. ``is_complete``: all that it returned was read, and there was
        any; ``ended_by``: the exception that left it instead.
        """
        live = [f for f in self._related(call, None) if f.is_pending and not f.is_absorbed]
        if ended_by:
            for finding in live:
                finding.ended_by = f"{ended_by} has left {call.node.name}.forward"
            return
        for finding in self.findings:
            finding.ended_by = ""  # the run has gone on
        returned = [self._by_token[token] for token in call.outputs if token in self._by_token]
        left = [f for f in returned if f.is_pending]
        roots = {id(f): f for f in self._suspects(live)} if left else {}
        roots.update((id(f.root), f.root) for f in left)
        self._reach(in_order(roots.values()), "the model returned it")
        if not is_complete:
            unread = self._suspects(f for f in live if f.is_pending and f.has_nan)
            self._reach(unread, "what the model returned was not read")

    def loss(self, finding: Finding, scaled: bool = False) -> None:
        """The loss: what backward() is called on, or monitor.step(loss=) is given. -Inf is no mask
        here. ``scaled``: it carries a scale of the user's own.
        """
        self._add(finding)
        confirmed = self._first_confirmed()
        tentative = self._pending_gradient() or self._promotable(self.findings[:-1])
        reason = "every tensor observed in this step was finite: the loss itself overflowed"
        if confirmed is not None:
            self._propagate(finding, confirmed)
        elif tentative is not None and tentative.waits:
            self._promote(tentative, finding)
        elif scaled:
            self._judge_gradient(finding, None, Verdict.ORIGIN, reason, scaled)
        elif tentative is not None:
            self._promote(tentative, finding)
        else:
            self._decide(finding, Verdict.ORIGIN, reason)

    def known_loss(self, token: int) -> None:
        """The loss is a tensor that was already read (the criterion's output). In a loss, -Inf is
        no mask.
        """
        finding = self._by_token.get(token)
        if finding is not None and finding.is_pending:
            self._reach([finding.root], "it is the loss")
        elif finding is not None and finding.is_tentative:
            root = finding.root
            root.release()
            self.changed.append(root)
            if finding is not root:
                self._propagate(finding, root)

    # Parameters and buffers

    def parameter(self, finding: Finding, triggered_by: Optional[Finding]) -> None:
        """A parameter or buffer. ``triggered_by``: the finding for which it was read; None when all
        are read.
        """
        self._add(finding)
        if triggered_by is not None:
            finding.position = triggered_by.position
        last_finite = self._last_finite_step(finding.site)
        if triggered_by is None:
            earlier = self._first_confirmed()
        else:
            earlier = next(
                (f for f in self.findings if f.is_confirmed and f.role in ("param", "buffer")), None
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
            reason = was_finite(finding.role, last_finite)
        # One that was non-finite before may have been reset to that.
        was_harmless = finding.site in self._masks
        may_be_meant = finding.role == "buffer" and (last_finite is None or was_harmless)
        is_suspect = triggered_by is not None and not (finding.has_nan and was_harmless)
        if finding.is_mask or (may_be_meant and not is_suspect):
            what = "a stored NaN" if finding.has_nan else "a stored infinity"
            what += ", probably written on purpose"
            finding.hold(Verdict.UNRESOLVED, what, Verdict.ARRIVED, reason)
            self.changed.append(finding)
        else:
            self._keep(finding)
            if finding.verdict is Verdict.NONE:
                self._decide(finding, Verdict.ARRIVED, reason)

    def _keep(self, finding: Finding) -> None:
        """A buffer was finite, and is not any more: what its module has read or made is in it."""
        site = self._sites[finding.site]
        for call in list(self._calls) if site.role == "buffer" else ():
            if call.node.path == site.module:
                pending = [f for f in self._met_by(call) if f.is_pending and not f.is_gradient]
                roots = self._suspects(pending)[:1]
                if roots:
                    self._reach(roots, self._it_reached(finding))
                    self._propagate(finding, roots[0])
                    return

    def optimizer_state(self, finding: Finding, is_square_large: bool) -> None:
        """What the optimizer keeps of a parameter, after its update. ``is_square_large``: the
        square of the gradient that it has used is beyond the gradient's dtype.
        """
        self._add(finding)
        earlier = self._first_confirmed()
        if earlier is not None:
            self._propagate(finding, earlier)
            return
        reason = "it is not finite after the update"
        if is_square_large:
            reason += ", which used a finite gradient whose square its dtype does not hold"
        self._decide(finding, Verdict.ORIGIN, reason)

    # Shared

    def _is_mask(self, root: Finding) -> bool:
        return root.is_mask or root.is_absorbed or root.site in self._masks

    def _related(self, call: Call, besides: Optional[Finding]) -> list[Finding]:
        """The findings among the call's inputs, and those of its submodules until now."""
        made = [
            f
            for f in self.findings
            if f.position >= call.first_seq and f.thread == call.thread and not f.is_gradient
        ]
        return [f for f in self._read_by(call) + made if f is not besides]

    def _judge_forward(
        self,
        finding: Finding,
        related: list[Finding],
        call: Optional[Call],
        owner: ModuleNode,
        verdict: Verdict,
        reason: str,
    ) -> None:
        """``call``: it is an output of this one; None: ``owner`` has given it to a submodule."""
        confirmed = next((f for f in related if f.is_confirmed), None)
        if confirmed is not None:
            self._propagate(finding, confirmed)
            return
        allowed = next((f for f in related if f.verdict is Verdict.INTENDED), None)
        if allowed is not None:
            reason = f"what allow_nonfinite() allows in {self._sites[allowed.site]} came this far"
        tentative = [f for f in related if f.is_tentative]
        is_inner = call is None or call.parent is not None
        may_wait = is_inner and self.may_wait(finding)
        if finding.only_neginf:
            finding.hold(Verdict.UNRESOLVED, finding.mask_reason, verdict, reason)
            fresh = (f for f in tentative if not (f.is_absorbed or self._is_mask(f.root)))
            finding.cause = next(fresh, tentative[0] if tentative else None)
            self.changed.append(finding)
            return
        cause = self._pending_cause(related, [] if call is None else self._read_by(call))
        if cause is None:
            cause = self._promotable(tentative)
            if cause is not None and cause.only_neginf:
                cause = None if call is not None and call.node.is_softmax_like else cause
        if cause is not None and may_wait:
            self.pend(finding, verdict, reason, cause)
            return
        if cause is not None:
            for other in self._suspects(f for f in related if not f.is_absorbed):
                if other is not cause and other.waits:
                    self._reach([other], "the model returned it")
            self._promote(cause, finding)
            return
        parameter = self._check_parameters(owner, finding)
        if parameter is not None:
            self._propagate(finding, parameter)
        elif may_wait:
            self.pend(finding, verdict, reason)
        else:
            self._decide(finding, verdict, reason)
