"""The verdict at module level: whether a non-finite record is the origin, arrived from outside, was
propagated, is unresolved (-Inf alone) or scaled. Nothing here reads a tensor.

Forward records are judged by provenance: what the module read, and what was computed inside it.
Gradients are judged in the order in which autograd computes them: the first non-finite gradient has
only finite gradients behind it, so it is the origin, and the later gradients are taken to follow
from it.

A NaN or an infinity that one module hands to another, and a gradient between two modules, are
pending until something that was made of them lasts or leaves: the model returns it, it is in the
loss, in a buffer, or in a gradient that an optimizer uses. What is made of a finding is known by
what modules read and return, not by operators: everything that is made within a call, or of what it
read, may follow from it. Where all that the outermost module returned is finite it is out of
consideration, but for what its gradients are made of. With ``is_strict`` (``Stop(count="all")``)
nothing is pending.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Callable, Optional

from fastcheck.calls.module_calls import Call, ModuleNode
from fastcheck.record.event import (
    CHANGED_BY_LOOP,
    COMPUTED_OUTSIDE,
    GIVEN_INSTEAD,
    MAYBE_CHANGED,
    NEVER_FINITE,
    NOT_STEPPED,
    WHEN_LAST_READ,
    WRITTEN_BY_LOOP,
)
from fastcheck.record.format import Verdict, is_nonfinite
from fastcheck.utils.text.layout import listed

from . import entries
from .findings import (
    CONFIRMED,
    Blame,
    Finding,
    Findings,
    FindingState,
    PossibleVerdict,
    is_statistic,
)
from .step import Step

_WAITS = "whether it counts depends on what is computed from it"
_ABSORBED = "no stored tensor, and nothing that the model returned, is non-finite"
_BETWEEN = ("grad_input", "grad_output")
_OR_WRITTEN = "or the program wrote it after backward()"
_PARAMETERS = ", including its parameters"
_PARAMETERS_BEFORE = f"{_PARAMETERS} {WHEN_LAST_READ}"


def _is_of_model(call: Call) -> bool:
    """True if what an outermost call returns has left the model: not that of a part without
    parameters, as a metric or a function of the data is, which the program may leave unused.
    """
    if call.parent is not None:
        return False
    module = call.node.module()
    return call.node.is_root or module is None or next(module.parameters(), None) is not None


def made_in_loss(findings: Findings) -> str:
    """The reason of a loss that is the first to be non-finite."""
    return (
        f"every tensor that was read in this step was finite{_except_for(findings)}: it was made "
        "between these tensors and the loss, where nothing is read, or came in there (a target)"
    )


def _except_for(findings: Findings) -> str:
    """A clause on the first finding that is tentative, such as a -Inf that may be a mask, or that
    did no harm.
    """
    for finding in findings.tentative or [f for f in findings.all if f.verdict is Verdict.BENIGN]:
        which = "-Inf" if finding.only_neginf else "values that did no harm"
        return f", except for {which} in {findings.sites[finding.blamed.site].in_text}"
    return ""


def was_finite(role: str, step: int) -> str:
    """The reason why a stored tensor, last seen finite in ``step``, is an event."""
    when = "when it was read in" if role == "buffer" else "just before the update of"
    return f"it was finite {when} step {step}, and no longer is"


def harm(findings: Findings, root: Finding, harmed: Finding) -> str:
    """A clause on how ``harmed`` shows that an undecided finding did harm."""
    what = "its -Inf" if root.only_neginf else "it"
    return f"{what} did harm: {findings.sites[harmed.site].in_text} is non-finite too"


@dataclass(eq=False)
class ModuleRules:
    """Gives the findings of one step their verdicts."""

    findings: Findings
    _step: Step
    _last_finite_step: Callable[[int], Optional[int]]
    is_strict: bool
    has_other_ranks: bool
    # Parameters that were looked for last had been read before what may come of them.
    _is_dated: bool = False

    def apply(self, entry: entries.Seen, bad: entries.Records) -> None:
        """Judges what the entry has read."""
        if isinstance(entry, entries.Returned):
            self._returned(entry)
        elif isinstance(entry, entries.LossKnown):
            self._loss_known(entry)
        elif isinstance(entry, entries.GradientsUsed):
            self._use_gradients(entry.seqs)
        else:
            for finding in self.findings.new(entry, bad):
                _RULES[type(entry)](self, finding, entry)

    # Forward

    def _batch(self, finding: Finding, entry: entries.Batch) -> None:
        finding.is_data = entry.is_data and not entry.needs_gradient
        # A value that enters the module now can only follow from what came after its last pass.
        since = [f for f in self.findings.all[:-1] if f.position >= entry.since]
        earlier = next((f for f in since if f.verdict in CONFIRMED), None)
        if earlier is not None and not entry.is_data:
            self.findings.propagate(finding, earlier)
            return
        undecided = None if entry.is_data else self._promotable(since)
        if undecided is not None and not finding.only_neginf:
            self._promote(undecided, finding)
            return
        reason = "it is part of the batch, and no observed module made it"
        if not entry.is_data:
            where = "in an excluded module, or outside" if entry.has_excluded else "outside"
            before = "nothing observed before it was"
            if undecided is not None:
                before = f"{self.findings.sites[undecided.site].in_text} was, before it,"
            reason = f"{COMPUTED_OUTSIDE} {where} the observed modules, and {before} non-finite"
        if finding.only_neginf or (entry.is_data and not finding.is_saturated):
            # A model may impute what is missing: what it makes of it decides.
            waits = finding.mask_reason if finding.only_neginf else "it is part of the batch"
            self.findings.hold(
                finding, FindingState.DOUBTFUL, waits, PossibleVerdict(Verdict.ARRIVED, reason)
            )
        else:
            self.findings.decide(finding, Verdict.ARRIVED, reason)

    def _inner_input(self, finding: Finding, entry: entries.InnerInput) -> None:
        """The parent's own code computed it."""
        parent = entry.call.parent
        assert parent is not None
        related = self._related(parent, finding)
        name = parent.node.name
        verdict = Verdict.ORIGIN
        reason = f"{name}.forward computed it between its submodules, from finite values"
        reason += self._but_for(parent.node)
        if parent.node.has_excluded_parts:
            verdict = Verdict.ARRIVED
            reason = f"no observed module made it, but {name} contains modules that are excluded"
        elif entry.after_gap:
            verdict = Verdict.ARRIVED
            reason = (
                f"no observed module made it: either {name}.forward computed it between its "
                "submodules, or it was kept from a step that every= skipped"
            )
        earlier = [f for f in self.findings.all[:-1] if not f.is_gradient]
        related += [f for f in earlier if f.verdict in CONFIRMED][:1]
        related += [f for f in earlier if f.state.is_pending and not f.uses.is_absorbed][:1]
        self._judge_forward(finding, related, None, parent.node, PossibleVerdict(verdict, reason))

    def _recomputed(self, finding: Finding, entry: entries.Recomputed) -> None:
        """Judges a finding of a recomputed call, whose first run was judged."""
        reason = (
            f"{entry.call.node.name} was recomputed in backward (activation checkpointing): its "
            "first run counts"
        )
        then = PossibleVerdict(Verdict.PROPAGATED, reason)
        place = finding.site, finding.record["call"]
        first = next(f for f in self.findings.all if (f.site, f.record["call"]) == place)
        if finding.only_neginf:
            self.findings.hold(finding, FindingState.DOUBTFUL, reason, then)
        elif first is not finding and first.state.is_pending:
            self._pend(finding, then, first.root)
        else:
            self.findings.decide(finding, *then)

    def _named(self, finding: Finding, entry: entries.Named) -> None:
        """Judges a named tensor like the input of a module, in the place where it was named."""
        seq, call = entry.seq, entry.call
        finding.blamed = Blame(finding.site, call.parent)
        if call.is_recompute:
            self._recomputed(finding, entries.Recomputed(seq, call, finding.role))
        elif call.parent is not None:
            self._inner_input(finding, entries.InnerInput(seq, call, entry.after_gap))
        else:
            self._batch(finding, entries.Batch(seq, call, 0, False, entry.has_excluded, False))

    def _output(self, finding: Finding, entry: entries.Output) -> None:
        call = entry.call
        related = self._related(call, finding)
        reason = f"everything that {call.node.name} read was finite"
        reason += self._but_for(call.node) or _PARAMETERS
        if call.node.has_excluded_parts or call.node.has_new_parts:
            reason = (
                f"everything that {call.node.name} read was finite, as far as it was observed; it "
                "contains modules that are not observed"
            )
        verdict = Verdict.ORIGIN
        if self.has_other_ranks and call.node.is_collective:
            verdict = Verdict.ARRIVED
            reason = (
                f"everything that {call.node.name} read on this rank was finite: the value came "
                "with the statistics of other ranks, or they overflowed"
            )
        tentative = [f for f in related if f.is_tentative]
        if tentative:
            what = "a NaN" if finding.has_nan else "something other than -Inf"
            place = self.findings.sites[tentative[0].root.blamed.site]
            reason = f"{call.node.name} made {what} where it read only finite values and "
            if all(source.only_neginf for source in tentative):
                reason += f"the -Inf of {place} (a row that is masked entirely does this)"
            else:
                reason += f"values that had done no harm before, of {place}"
        self._judge_forward(finding, related, call, call.node, PossibleVerdict(verdict, reason))

    def _judge_forward(
        self,
        finding: Finding,
        related: list[Finding],
        call: Optional[Call],
        owner: ModuleNode,
        then: PossibleVerdict,
    ) -> None:
        """``call``: it is an output of this call; None: ``owner`` has given it to a submodule."""
        confirmed = next((f for f in related if f.verdict in CONFIRMED), None)
        if confirmed is not None:
            self.findings.propagate(finding, confirmed)
            return
        allowed = next((f for f in related if f.verdict is Verdict.INTENDED), None)
        if allowed is not None:
            place = self.findings.sites[allowed.site]
            then = then._replace(
                reason=f"values that allow_nonfinite() allows in {place} spread here"
            )
        if finding.only_neginf:
            tentative = [f for f in related if f.is_tentative]
            fresh = (f for f in tentative if not (_is_absorbed(f) or self._is_mask(f.root)))
            cause = next(fresh, tentative[0] if tentative else None)
            self.findings.hold(finding, FindingState.DOUBTFUL, finding.mask_reason, then, cause)
            return
        may_wait = (call is None or not _is_of_model(call)) and self._may_wait(finding)
        cause = self._pending_cause(related, [] if call is None else self._read_by(call))
        if cause is None:
            cause = self._promotable(related)
            if cause is not None and cause.only_neginf:
                cause = None if call is not None and call.node.is_softmax_like else cause
        if cause is not None and may_wait:
            self._pend(finding, then, cause)
            return
        if cause is not None:
            for other in self._suspects(f for f in related if not f.uses.is_absorbed):
                if other is not cause and other.state.by_consequence:
                    self._reach([other], self._it_reached(finding))
            self._promote(cause, finding)
            return
        stored = self._first_stored(owner, finding)
        if self._is_dated:
            then = then._replace(reason=then.reason.replace(_PARAMETERS, _PARAMETERS_BEFORE))
        if stored is not None:
            self.findings.propagate(finding, stored)
        elif may_wait:
            self._pend(finding, then)
        else:
            self.findings.decide(finding, *then)

    def _returned(self, entry: entries.Returned) -> None:
        """All outputs of the call were read. If they are finite, the -Inf that it read did no
        harm.
        """
        call = entry.call
        if not self.findings.all:
            return
        if entry.is_complete and not any(seq in self.findings.by_seq for seq in call.outputs):
            for finding in self._related(call, None):
                if finding.is_tentative:
                    finding.uses.is_absorbed = True
                    if not finding.state.is_pending:
                        finding.root.uses.is_absorbed = True
        if call.parent is None and not call.is_recompute:
            self._pass_ended(call, entry.is_complete, entry.ended_by)

    def _pass_ended(self, call: Call, is_complete: bool, ended_by: str) -> None:
        """Takes in that an outermost call has returned."""
        live = [
            f for f in self._related(call, None) if f.state.is_pending and not f.uses.is_absorbed
        ]
        if ended_by:
            for finding in live:
                finding.uses.ended_by = f"{ended_by} has left {call.node.name}.forward"
            return
        for finding in self.findings.all:
            finding.uses.ended_by = ""  # the run has gone on
        left = [f for f in self._among(call.outputs) if f.state.is_pending]
        if left and _is_of_model(call):
            suspects = [f for f in live if f.site not in self.findings.memory.harmless]
            self._reach(self.findings.roots_of(suspects + left), call.node.returned_it)
        if not is_complete:
            unread = self._suspects(f for f in live if f.state.is_pending and f.has_nan)
            self._reach(unread, "what the model returned was not read")

    def _loss(self, finding: Finding, entry: entries.Loss) -> None:
        """Judges a loss, in which -Inf is no mask."""
        confirmed = self.findings.first_confirmed
        tentative = self._pending_gradient() or self._promotable(self.findings.all[:-1])
        if confirmed is not None:
            self.findings.propagate(finding, confirmed)
        elif tentative is not None and (tentative.state.by_consequence or not entry.is_scaled):
            self._promote(tentative, finding)
        elif (stored := self._first_stored(None, finding)) is not None:
            self.findings.propagate(finding, stored)
        else:
            then = PossibleVerdict(Verdict.ORIGIN, made_in_loss(self.findings))
            self._judge_gradient(finding, None, then, entry.is_scaled)

    def _loss_known(self, entry: entries.LossKnown) -> None:
        finding = self.findings.by_seq.get(entry.seq)
        if finding is not None and finding.state.is_pending:
            self._reach([finding.root], "it is the loss")
        elif finding is not None and finding.is_tentative:
            self.findings.release_root(finding)

    # Parameters and buffers

    def _first_stored(self, node: Optional[ModuleNode], triggered_by: Finding) -> Optional[Finding]:
        """The first non-finite thing that a module and its submodules (None: any module) store, if
        there is any, in the middle of a verdict.
        """
        first: Optional[Finding] = None
        self._is_dated = False
        was_finite_loss = node is None and self._last_finite_step(triggered_by.site) is not None
        for record, role, given in self._step.read_stored(node):
            if not is_nonfinite(record):
                self._is_dated |= bool(record["seq"] < triggered_by.seq)
                continue
            finding = Finding(record, role)
            finding.uses.given = given
            known = self.findings.by_seq.get(finding.seq)
            if known is None:
                finding.position = triggered_by.position
                self.findings.add(finding)
                if was_finite_loss and self._last_finite_step(finding.site) is None:
                    reason = "it was never finite, and did the loss of earlier steps no harm"
                    self.findings.decide(finding, Verdict.BENIGN, reason)
                    continue
                self._judge_stored(finding, is_suspect=True)
                if first is None and not finding.is_tentative:
                    first = finding
            elif first is None and known.verdict in CONFIRMED:
                first = known
        return first or (None if node is None else self._bad_buffer(node, triggered_by))

    def _but_for(self, node: ModuleNode) -> str:
        """A clause that names the parameters and buffers of the module and its submodules that are
        not finite, or were not in earlier steps, and did no harm; empty if there are none.
        """
        prefix = f"{node.path}." if node.path else ""
        numbers = {f.site for f in self.findings.tentative}
        names = []
        for number in sorted(numbers | self.findings.memory.masks):
            site = self.findings.sites[number]
            if site.role in ("param", "buffer") and f"{site.module}.".startswith(prefix):
                names.append(site.tensor_name)
        if not names:
            return ""
        have = "has" if len(names) == 1 else "have"
        return f", but for {listed(names, 1)}, which {have} held NaN or Inf"

    def _bad_buffer(self, node: ModuleNode, harmed: Finding) -> Optional[Finding]:
        """A buffer of the module that held NaN before the forward of this step, and never was
        finite: in training those of modules are not read again, which may write them. An infinity
        is a mask, or where a least or a largest number begins.
        """
        for finding in self.findings.all:
            path = f"{self.findings.sites[finding.site].module}."
            is_bad = finding.role == "buffer" and finding.is_tentative and finding.has_nan
            is_new = is_bad and finding.site not in self.findings.memory.harmless
            if is_new and (not node.path or path.startswith(f"{node.path}.")):
                self.findings.release(finding, harm(self.findings, finding, harmed))
                return finding
        return None

    def _stored(self, finding: Finding, entry: entries.Stored) -> None:
        self._judge_stored(finding, is_suspect=False)

    def _judge_stored(self, finding: Finding, is_suspect: bool) -> None:
        """``is_suspect``: it was read for the sake of another finding, not with all others."""
        confirmed = (f for f in self.findings.all if f.verdict in CONFIRMED)
        if is_suspect:
            confirmed = (f for f in confirmed if f.role in ("param", "buffer"))
        earlier = next(confirmed, None)
        if earlier is not None:
            self.findings.propagate(finding, earlier)
            return
        last_finite, update = self._last_finite_step(finding.site), self._step.update
        is_updated = update.count or update.is_partial or update.is_elsewhere
        verdict = Verdict.ARRIVED
        if finding.uses.given is not None:
            reason = f"{GIVEN_INSTEAD} in place of the model's own"
        elif last_finite is None:
            reason = f"{NEVER_FINITE}: look at the checkpoint or at the initialisation"
        elif not is_suspect and self._has_run(finding):
            verdict = Verdict.ORIGIN
            reason = f"{was_finite(finding.role, last_finite)}; its module has run since"
        elif last_finite == self._step.index and not is_updated:
            reason = f"it was finite when step {last_finite} began, and {NOT_STEPPED}"
        else:
            reason = was_finite(finding.role, last_finite)
        # A tensor that was non-finite before may have been reset to that.
        is_known = finding.site in self.findings.memory.masks
        is_first = last_finite is None and (finding.is_initial or not is_suspect)
        may_be_meant = finding.role == "buffer" or finding.only_neginf
        may_be_meant &= finding.has_nan or not is_statistic(self.findings.sites[finding.site])
        if finding.is_mask or (may_be_meant and (is_known or is_first)):
            what = "a stored NaN" if finding.has_nan else "a stored infinity"
            what += ", probably written on purpose"
            self.findings.hold(
                finding, FindingState.DOUBTFUL, what, PossibleVerdict(verdict, reason)
            )
            return
        root = None if is_suspect else self._kept_from(finding)
        if root is None:
            self.findings.decide(finding, verdict, reason)
        else:
            self._reach([root], self._it_reached(finding))
            self.findings.propagate(finding, root)

    def _has_run(self, finding: Finding) -> bool:
        """True if the module of this buffer has run in this step, in training."""
        site = self.findings.sites[finding.site]
        return site.role == "buffer" and any(
            call.node.path == site.module for call in list(self._step.calls)
        )

    def _kept_from(self, finding: Finding) -> Optional[Finding]:
        """A buffer was finite, and is not any more: what its module has read or made is in it."""
        site = self.findings.sites[finding.site]
        for call in list(self._step.calls) if site.role == "buffer" else ():
            if call.node.path == site.module:
                roots = self._suspects(f for f in self._met_by(call) if not f.is_gradient)
                if roots:
                    return roots[0]
        return None

    def _optimizer_state(self, finding: Finding, entry: entries.OptimizerState) -> None:
        earlier = self.findings.first_confirmed
        if earlier is not None:
            self.findings.propagate(finding, earlier)
            return
        if entry.is_after:
            reason = "it is not finite after the update, which used a finite gradient whose square "
            self.findings.decide(
                finding, Verdict.ORIGIN, reason + "is beyond the range of its dtype"
            )
        else:
            reason = "it was not finite before the first update that was observed"
            self.findings.decide(finding, Verdict.ARRIVED, reason)

    # Gradients

    def _gradient(self, finding: Finding, entry: entries.Gradient) -> None:
        earlier = self._earlier()
        if earlier is not None:
            self._judge_gradient(finding, earlier, _FOLLOWS, entry.is_scaled)
            return
        reader, reason = self._blame(finding, entry.tensor_seq)
        then = PossibleVerdict(Verdict.ORIGIN, reason)
        tentative: Optional[Finding] = None
        if not entry.is_scaled:
            met = self._met_by(reader) if reader else self.findings.all[:-1]
            tentative = self._promotable(met, reader)
        if not entry.is_scaled and self._may_wait(finding):
            self._pend(finding, then, tentative)
        elif tentative is not None:
            self._promote(tentative, finding)
        else:
            self._judge_gradient(finding, None, then, entry.is_scaled)

    def _used_gradient(self, finding: Finding, entry: entries.UsedGradients) -> None:
        is_scaled, before = entry.is_scaled, entry.before
        if not is_scaled:
            # The optimizer is about to use it: what was held back as scaled is real.
            self.settle_scaled(skipped=False)
        self._use_gradients(before.values())
        if not is_scaled and finding.site not in before:
            self._reach_by(finding)
        earlier = self._earlier()
        harmful = None if earlier is not None or is_scaled else self._harmful_to(finding)
        if harmful is not None:
            self._promote(harmful, finding)
            return
        then = self._how_made(finding)
        if finding.site in before:
            reason = (
                f"{CHANGED_BY_LOOP}: a later change, such as the training loop's own clipping or "
                "unscaling, made it non-finite, or brought it from another gradient"
            )
            then = PossibleVerdict(Verdict.ORIGIN, reason)
        self._judge_gradient(finding, earlier, then, is_scaled)

    def _unused_gradient(self, finding: Finding, entry: entries.UnusedGradients) -> None:
        """An optimizer may never use it."""
        if not (entry.is_scaled or entry.may_change):
            self._reach_by(finding)
        earlier = self._earlier()
        then = self._how_made(finding)
        if earlier is not None or entry.is_scaled:
            self._judge_gradient(finding, earlier, then, entry.is_scaled)
        else:
            reason = "no optimizer has used this gradient"
            self.findings.hold(finding, FindingState.UNUSED, reason, then)

    def _use_gradients(self, seqs: Collection[int]) -> None:
        """An optimizer is about to use these, which were read when backward() had ended."""
        unused = [f for f in self.findings.all if f.state is FindingState.UNUSED and f.seq in seqs]
        for finding in unused:
            self._reach_by(finding)
            earlier = self.findings.first_confirmed
            harmful = None if earlier is not None else self._harmful_to(finding)
            if earlier is not None:
                self.findings.propagate(finding, earlier)
            elif harmful is not None:
                self._promote(harmful, finding)
            else:
                self.findings.release(finding)

    def _gradient_norm(self, finding: Finding, entry: entries.GradientNorm) -> None:
        verdict = Verdict.ORIGIN
        reason = (
            "every gradient that was read is finite, but their norm is not: it overflowed, and "
            "clipping multiplies each gradient by max_norm / norm"
        )
        if self.has_other_ranks:
            verdict = Verdict.ARRIVED
            reason = (
                "every gradient that was read on this rank is finite, but the total norm is not: "
                "the value came with the gradients of other ranks, or the norm overflowed"
            )
        then = PossibleVerdict(verdict, reason)
        self._judge_gradient(finding, self._earlier(), then, entry.is_scaled)

    def _judge_gradient(
        self, finding: Finding, earlier: Optional[Finding], then: PossibleVerdict, is_scaled: bool
    ) -> None:
        if earlier is not None:
            then = PossibleVerdict(Verdict.PROPAGATED, self.findings.follows(earlier))
        if is_scaled and (earlier is None or earlier.verdict is Verdict.SCALED):
            self.findings.hold_scaled(finding, then, earlier)
        else:
            self.findings.decide(finding, *then, earlier)

    def _earlier(self) -> Optional[Finding]:
        """The finding that a gradient follows from."""
        return self.findings.first_confirmed or self.findings.first_scaled

    def _blame(self, finding: Finding, tensor_seq: int) -> tuple[Optional[Call], str]:
        """The call whose backward made the first non-finite gradient, that of the tensor
        ``tensor_seq``, if it is known, and the reason. Where a module read the tensor, the
        finding is blamed on that module's input.

        Autograd hands gradients back from the loss to the batch, each complete before it is passed
        on. So those of whatever was computed from the tensor are finite, and the code in between is
        to blame.
        """
        calls = self._step.calls
        consumers = calls.consumers(tensor_seq)
        if consumers:
            consumer = consumers[-1]
            source = self.findings.sites[consumer.input_sites[consumer.inputs.index(tensor_seq)]]
            site = consumer.node.site("grad_input", source.label, source.index)
            finding.blamed = Blame(site, consumer)
            same = (c for c in consumers if c.depth == consumer.depth and c is not consumer)
            others = [call.node.name for call in same]
            if others:
                return consumer, (
                    f"the backward of {consumer.node.name} made it, or that of "
                    f"{', '.join(others)}, which read the same tensor: the gradients of their "
                    "outputs were finite"
                )
            return consumer, (
                f"the backward of {consumer.node.name} made it, or that of code outside of modules "
                "that used the same tensor: the gradients of the module's outputs were finite"
            )
        producer = calls.producer(tensor_seq)
        if producer is None:
            return None, (
                "it is the first non-finite gradient of this step; the forward pass that it "
                "belongs to came earlier"
            )
        user = producer.parent
        while user is not None and tensor_seq in user.outputs:
            user = user.parent
        if user is None:
            return None, (
                "the code after the model (the loss, or its backward) made it: no gradient was "
                "read before this one"
            )
        return user, (
            f"the backward of the code in {user.node.name}.forward that used the tensor, outside "
            "its submodules, made it: the gradients read before this one were finite"
        )

    def _how_made(self, finding: Finding) -> PossibleVerdict:
        """The verdict on a parameter's gradient that is the first to be non-finite."""
        tensor_seq = self._step.given_by_gradient.get(finding.site)
        if tensor_seq is not None:
            reader, reason = self._blame(finding, tensor_seq)
            if reader is not None:
                return PossibleVerdict(Verdict.ORIGIN, f"{reason}; {_OR_WRITTEN}")
        finite = "every activation and every gradient observed in this step was finite"
        finite += _except_for(self.findings)
        made = "became NaN" if finding.record["nan_count"] else "overflowed"
        how = f"{made} while it was computed or accumulated"
        if self.has_other_ranks:
            reason = f"{finite}: this gradient came with the reduction over the ranks, or {how}"
            return PossibleVerdict(Verdict.ARRIVED, reason)
        reason = f"{finite}: this gradient {how}, {_OR_WRITTEN}"
        if not (self._step.update.passes or self._step.gradients):
            reason = f"{finite}, and no backward of a module was seen in it: {WRITTEN_BY_LOOP}"
        if self._step.update.has_changed_gradients:
            reason = (
                f"{finite}; {MAYBE_CHANGED}, before they were read (its own clipping or "
                "unscaling): the fault may have begun in another gradient"
            )
        return PossibleVerdict(Verdict.ORIGIN, reason)

    def _harmful_to(self, finding: Finding) -> Optional[Finding]:
        """The finding that was read in this step and did no harm until it became a part of this
        gradient of a parameter: something in the batch, or a -Inf that its module has read (times 0
        it is NaN).
        """
        tentative = self.findings.tentative
        held = next((f for f in tentative if self._is_held(f)), None)
        if held is not None or not tentative:
            return held
        path = self.findings.sites[finding.site].module
        for call in list(self._step.calls):
            if call.node.path == path:
                harmful = self._promotable(self._read_by(call), call)
                if harmful is not None:
                    return harmful
        return None

    def _is_held(self, finding: Finding) -> bool:
        return finding.is_held_input and finding.site not in self.findings.memory.masks

    # Findings that a call met

    def _among(self, seqs: Iterable[int]) -> list[Finding]:
        return [self.findings.by_seq[seq] for seq in seqs if seq in self.findings.by_seq]

    def _read_by(self, call: Call) -> list[Finding]:
        return self._among(call.inputs)

    def _related(self, call: Call, besides: Optional[Finding]) -> list[Finding]:
        """The findings among the call's inputs, and those of its submodules until now."""
        made = [
            f
            for f in self.findings.all
            if f.position >= call.first_seq and f.thread == call.thread and not f.is_gradient
        ]
        return [f for f in self._read_by(call) + made if f is not besides]

    def _met_by(self, call: Call) -> list[Finding]:
        """The findings that were made in the call, and those that are pending among what it
        read.
        """
        made = [f for f in self.findings.all if f.call and call in (f.call, f.call.parent)]
        return made + [f for f in self._read_by(call) if f.state.is_pending]

    # Tentative findings

    def _is_mask(self, root: Finding) -> bool:
        return root.is_mask or root.is_initial or root.site in self.findings.memory.masks

    def _promotable(
        self, candidates: Iterable[Finding], made_by: Optional[Call] = None
    ) -> Optional[Finding]:
        """The root of the first unresolved -Inf that may have done harm; not a -Inf that is a mask
        or was absorbed.

        The backward of the very module that made a -Inf is harmed by it even if later modules
        absorbed it.
        """
        for finding in candidates:
            root = finding.root
            if not finding.is_tentative or self._is_mask(root):
                continue
            if finding.state.is_pending and finding.site in self.findings.memory.harmless:
                continue
            if made_by is None and _is_absorbed(finding):
                continue
            return root
        return None

    def _promote(self, tentative: Finding, by: Finding) -> None:
        """Decides a tentative finding that did harm to ``by``."""
        stored = None if tentative.state.by_consequence else self._stored_cause(tentative)
        if tentative.state.by_consequence:
            self._reach([tentative], self._it_reached(by))
        elif stored is not None:
            self.findings.propagate(tentative, stored)
        else:
            self.findings.release(tentative, harm(self.findings, tentative, by))
            for follower in self.findings.pending_from(tentative):
                self.findings.propagate(follower, tentative)
        self.findings.propagate(by, tentative)

    def _stored_cause(self, root: Finding) -> Optional[Finding]:
        """The parameter that a -Inf was made of, if it is not finite. Of an inner input the module
        around it is asked: parametrizations are given a parameter as it is.
        """
        maker = root.call if root.role == "output" or root.call is None else root.call.parent
        if root.state.by_consequence or root.role not in ("input", "output") or maker is None:
            return None
        return self._first_stored(maker.node, root)

    # Pending findings

    def _may_wait(self, finding: Finding) -> bool:
        """True if its consequences decide. What saturated never becomes a NaN: it is judged at
        once.
        """
        return not self.is_strict and not finding.is_saturated

    def _pend(
        self, finding: Finding, then: PossibleVerdict, cause: Optional[Finding] = None
    ) -> None:
        """Leaves a finding to its consequences, or to those of ``cause``, which it follows from."""
        self.findings.hold(finding, FindingState.PENDING, _WAITS, then, cause)

    def _suspects(self, among: Iterable[Finding]) -> list[Finding]:
        """The roots of what is pending among these, earliest first, but for what is at a site at
        which it came to nothing in an earlier step.
        """
        known = self.findings.memory.harmless
        pending = [f for f in among if f.state.is_pending and f.site not in known]
        return self.findings.roots_of(pending) if pending else []

    def _pending_cause(
        self, related: Sequence[Finding], read: Sequence[Finding]
    ) -> Optional[Finding]:
        """The finding among these that a finding follows from. ``read``: what its module read;
        ``related``: that, and what was made within the module.
        """
        direct = next((f for f in read if f.state.is_pending or self._is_held(f)), None)
        if direct is not None:
            return direct.root
        live = [f for f in related if not f.uses.is_absorbed]
        suspects = self._suspects(live) or self._suspects(related)
        return suspects[0] if suspects else None

    def _pending_gradient(self) -> Optional[Finding]:
        """The root of the first pending gradient."""
        known = self.findings.memory.harmless
        for finding in self.findings.all:
            if finding.is_gradient and finding.state.is_pending and finding.site not in known:
                return finding.root
        return None

    def _reach(self, roots: Sequence[Finding], clause: str) -> None:
        """Something that was made of these lasts or leaves: ``clause`` ends the reason."""
        for root in roots:
            if root.verdict in CONFIRMED:
                continue
            is_plain = not root.state.by_consequence
            followers = self.findings.pending_from(root)
            made = next((f for f in followers if f.has_nan or is_plain), None)
            stored = self._stored_cause(root)
            if stored is not None:
                self.findings.propagate(root, stored)
            elif made is not None and (is_plain or not root.has_nan):
                self.findings.release(root, f"{harm(self.findings, root, made)}; {clause}")
            else:
                self.findings.release(root, clause)
            for follower in followers:
                self.findings.propagate(follower, root)

    def _reach_by(self, finding: Finding) -> None:
        """A parameter's gradient is not finite: what is pending behind it counts."""
        if self.findings.first_confirmed is None:
            self._reach_by_gradients(finding)

    def _reach_by_gradients(self, finding: Finding) -> None:
        """Counts the first of the pending gradients: the later gradients are taken to follow."""
        root = self._pending_gradient()
        if root is None:
            return
        self._reach([root], self._it_reached(finding))
        for other in self.findings.all:
            if other.is_gradient and other.state.is_pending and other is not root:
                self.findings.propagate(other, root)

    def _it_reached(self, finding: Finding) -> str:
        site = self.findings.sites[finding.site]
        if site.role == "output":
            return (
                "the model returned it" if finding.call is None else finding.call.node.returned_it
            )
        if site.role == "loss":
            return "it reached the loss"
        name = f"{site.module}.{site.label}" if site.module else site.label
        return f"it reached {'the gradient of ' if site.role == 'param_grad' else ''}{name}"

    # The end of an update, of a step, or of a run

    def settle_scaled(self, skipped: bool) -> Optional[Finding]:
        """Settles scaled gradients: an update uses those of parameters, the others are pending."""
        if not skipped and not self.is_strict:
            held = [f for f in self.findings.all if f.state is FindingState.SCALED]
            for finding in held:
                if finding.role in _BETWEEN and finding.then is not None:
                    self._pend(finding, finding.then, finding.cause)
            used = next((f for f in held if f.role not in _BETWEEN), None)
            if used is not None:
                self._reach_by_gradients(used)
        return self.findings.settle_scaled(skipped)

    def ensure_event(self) -> None:
        if self.findings.all:
            self.findings.ensure_event()

    def settle(self) -> None:
        if self.findings.all:
            self.findings.ensure_event()
            self.findings.remember_masks()
            self.settle_open()

    def settle_open(self) -> None:
        """Settles what is open: nothing of this step will be used any more. Something later in the
        step may still show otherwise: another optimizer's update.
        """
        if not self.findings.all:
            return
        is_healthy = self.findings.first_confirmed is None
        for finding in self.findings.all:
            if finding.state is FindingState.PENDING:
                if is_healthy:
                    self.findings.memory.harmless.add(finding.site)
                self.findings.lapse(finding, FindingState.SETTLED, _ABSORBED, finding.cause)

    def renew(self) -> None:
        self.settle_open()

    def count_cut_off(self) -> None:
        """The run ends: what an exception kept from its consequences counts."""
        cut = [f for f in self.findings.all if f.uses.ended_by and f.state.is_pending]
        for root in self._suspects(cut):
            clause = next(f.uses.ended_by for f in cut if f.root is root)
            self._reach([root], clause)

    def undecided(self) -> list[Finding]:
        """The findings that are pending and were not removed: of what follows from one another the
        first. The later gradients are taken to follow.
        """
        findings: dict[int, Finding] = {}
        gradient = self.findings.first_confirmed or self._pending_gradient()
        for finding in self.findings.all:
            if finding.state is FindingState.PENDING and not finding.uses.is_absorbed:
                root = (gradient if finding.is_gradient else None) or finding.root
                if root.verdict not in CONFIRMED:
                    findings.setdefault(id(root), finding)
        return list(findings.values())

    def let_go(self) -> None:
        pass


def _is_absorbed(finding: Finding) -> bool:
    return finding.uses.is_absorbed or finding.root.uses.is_absorbed


_FOLLOWS = PossibleVerdict(Verdict.PROPAGATED, "")

_RULES: Mapping[type, Callable[[ModuleRules, Finding, Any], None]] = {
    entries.Batch: ModuleRules._batch,
    entries.InnerInput: ModuleRules._inner_input,
    entries.Output: ModuleRules._output,
    entries.Recomputed: ModuleRules._recomputed,
    entries.Named: ModuleRules._named,
    entries.Gradient: ModuleRules._gradient,
    entries.Loss: ModuleRules._loss,
    entries.GradientNorm: ModuleRules._gradient_norm,
    entries.Stored: ModuleRules._stored,
    entries.UsedGradients: ModuleRules._used_gradient,
    entries.UnusedGradients: ModuleRules._unused_gradient,
    entries.OptimizerState: ModuleRules._optimizer_state,
}
