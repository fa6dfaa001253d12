"""The verdict on gradients at module level.

They are judged in the order in which autograd computes them: the first non-finite one has only
finite ones behind it, so it is the origin, and the later ones are taken to follow from it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Callable, Optional

from fastcheck.calls.module_calls import Call, CallLog, ModuleNode
from fastcheck.record.format import Verdict
from fastcheck.record.site import SiteTable

from .finding import Finding
from .gradient_source import blame
from .pending import PendingFindings

__all__ = ["CheckParameters", "GradientJudge"]

#: Reads a module's parameters now and returns a non-finite one.
CheckParameters = Callable[[ModuleNode, Finding], Optional[Finding]]

_NONE: Mapping[int, int] = {}


class GradientJudge(PendingFindings):
    """Gives the gradients of one step their verdicts."""

    def __init__(
        self,
        sites: SiteTable,
        masks: set[int],
        calls: CallLog,
        check_parameters: CheckParameters,
        has_other_ranks: bool = False,
    ) -> None:
        super().__init__(sites, masks)
        self._calls = calls
        self._check_parameters = check_parameters
        self._has_other_ranks = has_other_ranks
        #: Of the parameters that a module was given as an argument (a parametrization) the tokens,
        #: by the site of the gradient.
        self.parameter_tokens: dict[int, int] = {}
        #: The training loop has changed gradients before they were read.
        self.were_changed = False

    def gradient(self, finding: Finding, token: int, scaled: bool) -> None:
        """The gradient of the tensor with this token."""
        self._add(finding)
        earlier = self._first_confirmed() or self._first_scaled()
        if earlier is not None:
            self._judge_gradient(finding, earlier, Verdict.PROPAGATED, "", scaled)
            return
        reader, reason = blame(finding, token, self._calls, self._sites)
        if not scaled:
            tentative = self._promotable(
                self._met_by(reader) if reader else self.findings[:-1], reader
            )
            if self.may_wait(finding):
                self.pend(finding, Verdict.ORIGIN, reason, tentative)
                return
            if tentative is not None:
                self._promote(tentative, finding)
                return
        self._judge_gradient(finding, None, Verdict.ORIGIN, reason, scaled)

    def parameter_gradient(
        self, finding: Finding, scaled: bool, before: Mapping[int, int] = _NONE
    ) -> None:
        """A parameter's gradient, just before the optimizer uses it. ``before``: by site, the
        numbers of the records of gradients that were read when backward() had ended, and have
        changed since.
        """
        self._add(finding)
        self.use_gradients(before.values())
        if not scaled and finding.site not in before:
            self._reach_by(finding)
        earlier = self._first_confirmed() or self._first_scaled()
        harmful = None if earlier is not None or scaled else self._harmful_to(finding)
        if harmful is not None:
            self._promote(harmful, finding)
            return
        verdict, reason = self._how_made(finding)
        if finding.site in before:
            verdict = Verdict.ORIGIN
            reason = (
                "it was finite when backward() ended: what has changed it since made it so (the "
                "training loop's own clipping or unscaling)"
            )
        self._judge_gradient(finding, earlier, verdict, reason, scaled)

    def unused_gradient(self, finding: Finding, scaled: bool, may_change: bool) -> None:
        """A parameter's gradient when backward() has ended. An optimizer may never use it.
        ``may_change``: this training loop changes or skips gradients by itself.
        """
        self._add(finding)
        if not (scaled or may_change):
            self._reach_by(finding)
        earlier = self._first_confirmed() or self._first_scaled()
        verdict, reason = self._how_made(finding)
        if earlier is not None or scaled:
            self._judge_gradient(finding, earlier, verdict, reason, scaled)
            return
        finding.hold(Verdict.UNRESOLVED, "no optimizer has used this gradient", verdict, reason)
        self.changed.append(finding)

    def use_gradients(self, tokens: Collection[int]) -> None:
        """An optimizer is about to use these, of which unused_gradient() has judged."""
        for finding in [f for f in self.findings if f.is_unused and f.seq in tokens]:
            self._reach_by(finding)
            earlier = self._first_confirmed()
            harmful = None if earlier is not None else self._harmful_to(finding)
            if earlier is not None:
                self._propagate(finding, earlier)
            elif harmful is not None:
                self._promote(harmful, finding)
            else:
                finding.release()
                self.changed.append(finding)

    def _reach_by(self, finding: Finding) -> None:
        """A parameter's gradient is not finite: what is pending behind it counts."""
        root = None if self._first_confirmed() is not None else self._pending_gradient()
        if root is not None:
            self._reach_by_gradients(root, self._it_reached(finding))

    def _harmful_to(self, finding: Finding) -> Optional[Finding]:
        """What was read in this step and did no harm until it became a part of this gradient of a
        parameter: something in the batch, or a -Inf that its module has read (times 0 it is NaN).
        """
        tentative = [f for f in self.findings if f.is_tentative]
        held = next((f for f in tentative if f.is_held_input and f.site not in self._masks), None)
        if held is not None or not tentative:
            return held
        path = self._sites[finding.site].module
        for call in list(self._calls):
            if call.node.path == path:
                harmful = self._promotable(self._read_by(call), call)
                if harmful is not None:
                    return harmful
        return None

    def _how_made(self, finding: Finding) -> tuple[Verdict, str]:
        """The verdict on a parameter's gradient that is the first to be non-finite, and why."""
        token = self.parameter_tokens.get(finding.site)
        if token is not None:
            reader, reason = blame(finding, token, self._calls, self._sites)
            if reader is not None:
                return Verdict.ORIGIN, reason
        verdict, how = Verdict.ORIGIN, "overflowed while it was computed or accumulated"
        if self._has_other_ranks:
            verdict, how = Verdict.ARRIVED, f"came with the reduction over the ranks, or {how}"
        finite = self._all_finite("activation and every gradient")
        if self.were_changed and not self._has_other_ranks:
            return verdict, (
                f"{finite}; the training loop changed gradients between backward() and the update, "
                "before they were read (its own clipping or unscaling): it may have begun in "
                "another one"
            )
        return verdict, f"{finite}: this gradient {how}"

    def gradient_norm(self, finding: Finding, scaled: bool) -> None:
        """The norm of all gradients, as clipping has computed it."""
        self._add(finding)
        earlier = self._first_confirmed() or self._first_scaled()
        reason = (
            "every gradient that was read is finite, and their norm is not: it overflowed, and "
            "clipping multiplies each gradient by max_norm / norm"
        )
        verdict = Verdict.ORIGIN
        if self._has_other_ranks:
            verdict = Verdict.ARRIVED
            reason = (
                "every gradient that was read on this rank is finite, and the total norm is not: "
                "it came with the gradients of other ranks, or overflowed"
            )
        self._judge_gradient(finding, earlier, verdict, reason, scaled)

    def _all_finite(self, what: str) -> str:
        """What was finite until now. A -Inf that may be a mask is none of it."""
        tentative = next((f for f in self.findings if f.is_tentative), None)
        if tentative is None:
            return f"every {what} observed in this step was finite"
        place = self._sites[tentative.blamed_site]
        which = "-Inf" if tentative.only_neginf else "what did no harm"
        return f"every {what} observed in this step was finite, but for {which} in {place}"

    # Shared

    def _made_in(self, call: Optional[Call]) -> list[Finding]:
        if call is None:
            return []
        return [f for f in self.findings if f.call is call or (f.call and f.call.parent is call)]

    def _met_by(self, call: Call) -> list[Finding]:
        """What was made in the call, and what is pending among what it read."""
        return self._made_in(call) + [f for f in self._read_by(call) if f.is_pending]

    def _read_by(self, call: Call) -> list[Finding]:
        return [self._by_token[token] for token in call.inputs if token in self._by_token]

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
            if not finding.is_tentative or root.is_mask or root.site in self._masks:
                continue
            if finding.waits and finding.site in self.harmless_sites:
                continue
            if made_by is None and (finding.is_absorbed or root.is_absorbed):
                continue
            return root
        return None

    def _promote(self, tentative: Finding, by: Finding) -> None:
        if tentative.waits:
            self._reach([tentative], self._it_reached(by))
            self._propagate(by, tentative)
            return
        parameter = self._stored_cause(tentative)
        if parameter is not None:
            self._propagate(tentative, parameter)
            self._propagate(by, tentative)
            return
        tentative.release()
        tentative.reason += f"; {self._harm(tentative, by)}"
        self.changed.append(tentative)
        for follower in [f for f in self.findings if f.is_pending and f.root is tentative]:
            self._propagate(follower, tentative)
        self._propagate(by, tentative)

    def _stored_cause(self, root: Finding) -> Optional[Finding]:
        """Of an inner input the module around it is asked: parametrizations are given a parameter
        as it is.
        """
        maker = root.call if root.role == "output" or root.call is None else root.call.parent
        if root.waits or root.role not in ("input", "output") or maker is None:
            return None
        return self._check_parameters(maker.node, root)
