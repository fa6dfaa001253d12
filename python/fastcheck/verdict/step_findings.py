"""The findings of one step, and what the end of the step decides about them."""

from __future__ import annotations

from typing import Any, Callable, Optional

from fastcheck.record.format import Verdict
from fastcheck.record.site import SiteTable

from .allowed import allowances, why_allowed
from .finding import Finding

__all__ = ["StepFindings"]


class StepFindings:
    """``masks`` holds the numbers of sites whose -Inf did no harm in an earlier step. Every finding
    whose verdict was decided or changed is put in ``changed`` for the caller to take.
    """

    #: What is non-finite counts where it appears (``Stop(count="all")``).
    is_strict = False

    def __init__(self, sites: SiteTable, masks: set[int]) -> None:
        self.findings: list[Finding] = []
        self.changed: list[Finding] = []
        self._sites = sites
        self._masks = masks
        self._by_token: dict[int, Finding] = {}
        #: What may be non-finite among what is judged now.
        self.allowances = allowances()

    def is_finding(self, token: int) -> bool:
        """Whether the tensor with this token is non-finite."""
        return token in self._by_token

    def take(self, finding: Finding, method: Callable[..., None], *args: Any) -> None:
        """``method(self, finding, *args)`` judges the finding, unless it is allowed."""
        if not self._allow(finding):
            method(self, finding, *args)
        elif not self.is_finding(finding.seq):
            self._add(finding)

    def _allow(self, finding: Finding) -> bool:
        reason = why_allowed(self._sites[finding.site], self.allowances)
        if reason is not None:
            finding.is_allowed = True
            self._decide(finding, Verdict.INTENDED, reason)
        return reason is not None

    @property
    def has_held_gradients(self) -> bool:
        """Whether scaled gradients still wait for what the scaler decides."""
        return any(f.verdict is Verdict.SCALED and f.planned is not None for f in self.findings)

    @property
    def has_unused_gradients(self) -> bool:
        """Whether there are these, or gradients that no optimizer has used yet."""
        return self.has_held_gradients or any(f.is_unused for f in self.findings)

    # The end of the step

    def skip_unused(self) -> None:
        """No optimizer will use what it has not used until now."""
        for finding in self.findings:
            if finding.is_unused:
                finding.verdict = Verdict.SCALED
                finding.reason = "the training loop has left this update out"
                self.changed.append(finding)

    def settle_scaled(self, skipped: bool) -> Optional[Finding]:
        """The scaler has decided. Returns the first scaled gradient where the update was
        ``skipped``; otherwise the scaled gradients get the verdicts planned for them.
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

    def ensure_event(self) -> None:
        """Counts the first non-finite record of a step where none was counted as an origin."""
        confirmed = self._first_confirmed()
        has_origin = any(f.verdict in (Verdict.ORIGIN, Verdict.ARRIVED) for f in self.findings)
        if confirmed is not None and not has_origin:
            self._decide(
                confirmed,
                Verdict.ARRIVED,
                "the step has non-finite values, and no observed module began them",
            )

    def settle(self) -> None:
        """Ends the step: sites whose -Inf did no harm are remembered as masks."""
        self.ensure_event()
        if self._first_confirmed() is None:
            tentative = (f for f in self.findings if f.is_tentative and not f.waits)
            self._masks.update(f.site for f in tentative)

    def process_overflow(self, finding: Finding, reason: str) -> None:
        """The overflow status of a saturating device was set, and no tensor of the step shows it: a
        value inside an operator overflowed, or a NaN became 0. Adding a mask sets it too.
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

    # For the judges

    def _add(self, finding: Finding) -> None:
        self.findings.append(finding)
        self._by_token[finding.seq] = finding

    def _propagate(self, finding: Finding, cause: Finding) -> None:
        self._decide(finding, Verdict.PROPAGATED, self._follows(cause), cause)

    def _follows(self, cause: Finding) -> str:
        return f"it follows from {self._sites[cause.blamed_site]}"

    def _decide(
        self, finding: Finding, verdict: Verdict, reason: str, cause: Optional[Finding] = None
    ) -> None:
        finding.decide(verdict, reason, cause)
        self.changed.append(finding)

    def _first_confirmed(self) -> Optional[Finding]:
        return next((f for f in self.findings if f.is_confirmed), None)

    def _first_scaled(self) -> Optional[Finding]:
        return next((f for f in self.findings if f.verdict is Verdict.SCALED), None)
