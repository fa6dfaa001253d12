"""The findings on a fleet as HTML: what, which ranks, by what evidence, and what to do."""

from __future__ import annotations

from fastcheck.fleet.findings import Finding, FleetReport, Suspect
from fastcheck.report.page.shell import text_html

__all__ = ["fleet_headline", "fleet_verdict_html"]

#: Of one finding; the others are in the table of ranks.
_MOST_SUSPECTS = 32
_COLUMNS = ("rank", "host", "device", "serial", "from step", "where", "evidence")


def fleet_headline(report: FleetReport) -> str:
    """One line: who is suspect."""
    accused = report.accused
    if not accused:
        return f"{report.run}: no rank of {len(report.ranks):,} is suspect"
    if len(accused) == 1:
        return f"{report.run}: rank {accused[0]} of {len(report.ranks):,} is suspect"
    named = ", ".join(map(str, accused[:8])) + (", ..." if len(accused) > 8 else "")
    return f"{report.run}: {len(accused)} ranks of {len(report.ranks):,} are suspect: {named}"


def fleet_verdict_html(report: FleetReport) -> str:
    """The headline, what was looked at, and each finding with its ranks and with what to do."""
    colour = "bad" if report.accused else "good"
    parts = [
        f'<p class="headline {colour}">{text_html(fleet_headline(report))}</p>',
        f"<p>{text_html(report.extent)}</p>",
    ]
    for number, finding in enumerate(report.findings, 1):
        parts += _finding(report, finding, f"Ranks of finding {number}")
    return "\n".join(parts)


def _finding(report: FleetReport, finding: Finding, label: str) -> list[str]:
    kind = "Suspect" if finding.is_accusation else "Remark"
    tag = ' class="bad"' if finding.is_accusation else ""
    parts = [f"<h3><span{tag}>{kind}:</span> {text_html(finding.what)}</h3>"]
    if finding.suspects:
        head = "".join(f'<th scope="col">{name}</th>' for name in _COLUMNS)
        rows = "".join(_row(report, one) for one in finding.suspects[:_MOST_SUSPECTS])
        parts.append(
            f'<div class="scrolling" tabindex="0" role="region" aria-label="{label}">'
            f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
        )
        left = len(finding.suspects) - _MOST_SUSPECTS
        if left > 0:
            parts.append(f'<p class="hint">and {left:,} more ranks, in the table of ranks</p>')
    parts.append(f"<p><strong>Try:</strong> {text_html(finding.advice)}</p>")
    return parts


def _row(report: FleetReport, suspect: Suspect) -> str:
    at = report.ranks.get(suspect.rank)
    place = [None, None, None] if at is None else [at.host, at.device, at.serial]
    cells = [
        str(suspect.rank),
        *(text or "unknown" for text in place),
        f"{suspect.first_step:,}",
        suspect.site,
        suspect.evidence,
    ]
    return "<tr>" + "".join(f"<td>{text_html(cell)}</td>" for cell in cells) + "</tr>"
