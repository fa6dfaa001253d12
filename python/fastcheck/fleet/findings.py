"""The findings in a fleet, as data and as text."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Optional

from fastcheck.utils.text.numbers import counted


@dataclass(frozen=True)
class FleetRank:
    """A rank: where it runs, and how far its records go. None where that is unknown."""

    rank: int
    node: Optional[str]
    host: Optional[str]
    device: Optional[str]
    serial: Optional[str]
    replica_group: Optional[str]
    first_step: int
    last_step: int
    row_count: int

    def __str__(self) -> str:
        known = [
            f"host {self.host}" if self.host else "host unknown",
            self.device or "device unknown",
            f"serial {self.serial}" if self.serial else "serial unknown",
        ]
        return f"rank {self.rank} ({', '.join(known)})"


@dataclass(frozen=True)
class Suspect:
    """A rank of a finding, with its own evidence. ``site``: a place by its name."""

    rank: int
    first_step: int
    site: str
    evidence: str
    places: int = 1


@dataclass(frozen=True)
class FleetFinding:
    """Something that is wrong, or worth a look.

    ``kind``: ``replicas`` (copies of a weight differ), ``nonfinite`` (where the first NaN or
    infinity is), ``outlier`` (a rank that is far from its peers again and again), ``host`` (several
    such ranks of one host), ``stopped`` (a rank that writes no more), ``step`` (all ranks at once).
    ``is_accusation``: it names ranks to take out of service; otherwise it is a remark.
    """

    kind: str
    is_accusation: bool
    what: str
    advice: str
    first_step: int
    suspects: tuple[Suspect, ...] = ()
    host: Optional[str] = None

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that it names."""
        return tuple(suspect.rank for suspect in self.suspects)


@dataclass(frozen=True)
class Cell:
    """A rank and a step that are unusual. ``kind``: ``outlying``, by ``z`` robust standard
    deviations, ``replicas`` or ``nonfinite``; ``sites``: at how many sites.
    """

    rank: int
    step: int
    kind: str
    z: float
    sites: int


@dataclass(frozen=True)
class FleetReport:
    """The findings on a run, accusations first, and what was looked at."""

    run: str
    engine: str
    ranks: dict[int, FleetRank]
    site_count: int
    row_count: int
    first_step: int
    last_step: int
    findings: tuple[FleetFinding, ...]
    #: The data of the page: what is unusual, and the steps that have records.
    cells: tuple[Cell, ...] = field(default=(), repr=False)
    steps: tuple[int, ...] = field(default=(), repr=False)

    @property
    def accused(self) -> tuple[int, ...]:
        """All ranks that an accusation names, sorted."""
        ranks = {
            rank for finding in self.findings if finding.is_accusation for rank in finding.ranks
        }
        return tuple(sorted(ranks))

    @property
    def _hosts(self) -> set[str]:
        """The hosts that are known."""
        return {rank.host for rank in self.ranks.values() if rank.host is not None}

    @property
    def extent(self) -> str:
        """The extent of the records that were read, in words."""
        places = [counted(len(self._hosts), "host")] if self._hosts else []
        if any(rank.host is None for rank in self.ranks.values()):
            places.append("unknown hosts")
        return (
            f"{counted(len(self.ranks), 'rank')} on {' and '.join(places)}, "
            f"{counted(self.site_count, 'site')}, steps {self.first_step:,} to "
            f"{self.last_step:,}, {counted(self.row_count, 'row')}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON: without the cells."""
        return {
            "run": self.run,
            "engine": self.engine,
            "ranks": len(self.ranks),
            "hosts": len(self._hosts),
            "sites": self.site_count,
            "rows": self.row_count,
            "first_step": self.first_step,
            "last_step": self.last_step,
            "accused": list(self.accused),
            "findings": [self._finding_dict(finding) for finding in self.findings],
        }

    def _finding_dict(self, finding: FleetFinding) -> dict[str, Any]:
        made = asdict(finding)
        for suspect in made["suspects"]:
            at = self.ranks.get(suspect["rank"])
            place = {} if at is None else {"host": at.host, "device": at.device}
            suspect.update(place, serial=None if at is None else at.serial)
        return made

    def text(self, most: int = 16) -> str:
        """The report as plain text; of each finding ``most`` ranks."""
        lines = [f"run       {self.run}: {self.extent}"]
        if not any(finding.is_accusation for finding in self.findings):
            lines.append("verdict   no rank is suspect")
        for finding in self.findings:
            lines += ["", f"{'suspect' if finding.is_accusation else 'remark':10}{finding.what}"]
            for suspect in finding.suspects[:most]:
                lines.append(f"          {self.ranks.get(suspect.rank, f'rank {suspect.rank}')}")
                lines.append(f"            from step {suspect.first_step:,}, at {suspect.site}")
                lines.append(f"            {suspect.evidence}")
            if len(finding.suspects) > most:
                lines.append(f"          and {len(finding.suspects) - most:,} more ranks")
            lines.append(f"try       {finding.advice}")
        return "\n".join(lines)
