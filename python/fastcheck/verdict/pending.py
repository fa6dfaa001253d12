"""Consequences at module level: a NaN or an infinity that one module hands to another, and a
gradient between two modules, are pending until something that was made of them lasts or leaves: the
model returns it, it is in the loss, in a buffer, or in a gradient that an optimizer uses.

What is made of a finding is known by what modules read and return, not by operators: everything
that is made within a call, or of what it read, may follow from it. Where all that the outermost
module returned is finite it is out of consideration, but for what its gradients are made of.

With ``is_strict`` (``Stop(count="all")``) nothing is pending.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Optional

from fastcheck.record.format import Verdict

from .finding import Finding
from .step_findings import StepFindings

__all__ = ["PendingFindings", "in_order"]


_WAITS = "what is made of it decides whether it counts"
_ABSORBED = "nothing that lasts, and nothing that left the model, is non-finite"
_BETWEEN = ("grad_input", "grad_output")


def in_order(findings: Iterable[Finding]) -> list[Finding]:
    """The earliest first."""
    return sorted(findings, key=lambda finding: finding.position)


class PendingFindings(StepFindings):
    """Holds findings until their consequences are known."""

    #: Op level has links between findings of its own.
    holds = True
    #: The numbers of sites at which something was pending in an earlier step, and came to nothing.
    harmless_sites: set[int]

    def may_wait(self, finding: Finding) -> bool:
        """Whether its consequences decide. What saturated never becomes a NaN: it is judged at
        once.
        """
        return self.holds and not self.is_strict and not finding.is_saturated

    def pend(
        self, finding: Finding, planned: Verdict, reason: str, cause: Optional[Finding] = None
    ) -> None:
        """Its consequences decide, or those of ``cause``, which it follows from."""
        finding.hold(Verdict.UNRESOLVED, _WAITS, planned, reason)
        finding.waits = True
        finding.cause = cause
        self.changed.append(finding)

    # Where it began

    def _suspects(self, among: Iterable[Finding]) -> list[Finding]:
        """Where what is pending among these began, earliest first, but for what is at a site at
        which it came to nothing in an earlier step.
        """
        known = self.harmless_sites
        roots = {id(f.root): f.root for f in among if f.is_pending and f.site not in known}
        return in_order(roots.values())

    def _pending_cause(
        self, related: Sequence[Finding], read: Sequence[Finding]
    ) -> Optional[Finding]:
        """Which of these a finding follows from. ``read``: what its module read; ``related``: that,
        and what was made within the module.
        """
        direct = [
            f for f in read if f.is_pending or (f.is_held_input and f.site not in self._masks)
        ]
        live = [f for f in related if not f.is_absorbed]
        suspects = [f.root for f in direct] or self._suspects(live) or self._suspects(related)
        return suspects[0] if suspects else None

    def _pending_gradient(self) -> Optional[Finding]:
        """Where the first pending gradient began."""
        for finding in self.findings:
            is_pending = finding.is_gradient and finding.is_pending
            if is_pending and finding.site not in self.harmless_sites:
                return finding.root
        return None

    # Consequences

    def _reach(self, roots: Sequence[Finding], clause: str) -> None:
        """Something that was made of these lasts or leaves: ``clause`` ends the reason."""
        for root in roots:
            if root.is_confirmed:
                continue
            pending = [f for f in self.findings if f.is_pending and f is not root]
            followers = [f for f in pending if f.root is root]
            made = next((f for f in followers if f.has_nan or not root.waits), None)
            stored = self._stored_cause(root)
            if stored is not None:
                self._propagate(root, stored)
                for follower in followers:
                    self._propagate(follower, root)
                continue
            root.release()
            if made is not None and (not root.has_nan or not root.waits):
                root.reason += f"; {self._harm(root, made)}"
            root.reason += f"; {clause}"
            self.changed.append(root)
            for follower in followers:
                self._propagate(follower, root)

    def _reach_by_gradients(self, root: Finding, clause: str) -> None:
        """As _reach(), of the first pending gradient: the later ones are taken to follow."""
        self._reach([root], clause)
        for finding in self.findings:
            if finding.is_gradient and finding.is_pending and finding is not root:
                self._propagate(finding, root)

    def _stored_cause(self, root: Finding) -> Optional[Finding]:
        """The parameter that a -Inf was made of, if it is not finite."""
        raise NotImplementedError

    def _harm(self, root: Finding, harmed: Finding) -> str:
        site = self._sites[harmed.site]
        where = site.tensor_name if site.role == "loss" else str(site)
        what = "its -Inf" if root.only_neginf else "it"
        return f"{what} did harm: {where} is non-finite too"

    def settle_scaled(self, skipped: bool) -> Optional[Finding]:
        """Of scaled gradients an update uses those of parameters: the others are pending."""
        if not skipped and self.holds and not self.is_strict:
            held = [f for f in self.findings if f.verdict is Verdict.SCALED and f.planned]
            for finding in held:
                if finding.role in _BETWEEN and finding.planned is not None:
                    self.pend(finding, *finding.planned, finding.cause)
            used = next((f for f in held if f.role not in _BETWEEN), None)
            root = self._pending_gradient()
            if used is not None and root is not None:
                self._reach_by_gradients(root, self._it_reached(used))
        return super().settle_scaled(skipped)

    def _it_reached(self, finding: Finding) -> str:
        site = self._sites[finding.site]
        if site.role == "output":
            return "the model returned it"
        if site.role == "loss":
            return "it reached the loss"
        name = f"{site.module}.{site.label}" if site.module else site.label
        return f"it reached {'the gradient of ' if site.role == 'param_grad' else ''}{name}"

    # The end of a step, or of a run

    def count_cut_off(self) -> None:
        """The run ends: what an exception kept from its consequences counts."""
        cut = [f for f in self.findings if f.ended_by and f.is_pending]
        for root in self._suspects(cut):
            clause = next(f.ended_by for f in cut if f.root is root)
            self._reach([root], clause)

    def undecided(self) -> list[Finding]:
        """What is pending and was not removed: of what follows from one another the first."""
        found: dict[int, Finding] = {}
        for finding in self.findings:
            is_live = finding.is_pending and finding.verdict is Verdict.UNRESOLVED
            if is_live and not finding.is_absorbed:
                found.setdefault(id(finding.root), finding)
        return list(found.values())

    def settle(self) -> None:
        super().settle()
        self.settle_pending()

    def settle_pending(self) -> None:
        """Nothing of this step will be used any more. Something later in the step may still show
        otherwise: another optimizer's update.
        """
        is_healthy = self._first_confirmed() is None
        for finding in self.findings:
            if finding.is_pending and finding.verdict is Verdict.UNRESOLVED:
                if is_healthy:
                    self.harmless_sites.add(finding.site)
                finding.verdict = Verdict.ABSORBED
                finding.reason = _ABSORBED
                self.changed.append(finding)
