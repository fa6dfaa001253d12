"""Asks an engine the questions, and makes findings of its answers.

A rank is accused of being an outlier when it is an outlier in so many steps that chance does not
explain it, given how often rows of this fleet are outliers at all: the expected number of ranks
that get there by chance is below 0.0001.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from fastcheck.errors import ConfigError, LogError
from fastcheck.utils.grouping import grouped
from fastcheck.utils.text.layout import listed
from fastcheck.utils.text.numbers import counted

from .engines import Engine
from .findings import Cell, FleetFinding, FleetRank, FleetReport, Suspect
from .questions import ALL_OUTLYING, ANSWERS, CELL_ANSWERS, RANK_LIMIT, TABLES_IN_ORDER, statement
from .schema import KEYS

_BY_CHANCE = 1e-4
_FEWEST_STEPS = 3


def fewest_steps(answers: Mapping[str, list[dict[str, Any]]]) -> float:
    """The smallest number of steps in which no rank of this fleet is an outlier at one site by
    chance.
    """
    counts = answers["looked_at"][0]
    rows, steps = int(counts["row_count"] or 0), int(counts["step_count"] or 0)
    outlying = sum(int(row["steps"]) for row in answers["outliers"])
    return fewest_by_chance(outlying / rows * steps, rows / steps) if rows else math.inf


def fewest_by_chance(mean: float, tries: float) -> int:
    """The smallest number, three at least, that fewer than ``_BY_CHANCE`` of ``tries`` Poisson
    variables of this mean reach or exceed, as expected.
    """
    term, below, number = math.exp(-mean), 0.0, 0
    tail = 1.0
    while number < _FEWEST_STEPS or tail * tries > _BY_CHANCE:
        below += term
        number += 1
        term *= mean / number
        # Beyond the mean the tail is at most a geometric series, which cancels nothing.
        tail = 1.0 - below if number <= mean + 1 else term / (1.0 - mean / (number + 1))
        if number > 1_000_000:
            break
    return number


def usual_count(values: Iterable[int]) -> float:
    """The usual count, whatever a few ranks do: twice the mean of the lower three quarters, plus
    0.3. At least the mean of ``values`` if these are Poisson variables.
    """
    ordered = sorted(values)
    kept = ordered[: max(1, math.ceil(len(ordered) * 0.75))]
    # The rest lies above by construction; doubled it covers the mean of a Poisson variable. Where
    # three quarters are 0 that mean is up to ln(4 / 3) = 0.288.
    return 2 * sum(kept) / len(kept) + 0.3


_MOST_CELLS = 1_000_000
#: The answers that have cells, and the kind of these.
_CELLS = ("outlying_steps", "outlying"), ("replica_cells", "replicas"), ("bad_cells", "nonfinite")
Answers = Mapping[str, list[dict[str, Any]]]


def is_any_bad(engine: Engine) -> bool:
    """True if a NaN or an infinity was found, which was not judged harmless."""
    return bool(engine.ask("SELECT count(first_bad) AS ranks FROM progress")[0]["ranks"])


def cell_answers(engine: Engine) -> dict[str, list[dict[str, Any]]]:
    """The answers that only the heat map needs."""
    return {
        name: engine.ask(statement(text, engine.dialect))
        for name, text in CELL_ANSWERS.items()
        if name != "bad_cells" or is_any_bad(engine)
    }


def unusual_cells(answers: Answers) -> tuple[Cell, ...]:
    """The unusual cells, limited to the most extreme cells that a page can hold; none if the page
    was not requested.
    """
    if "step_list" not in answers:
        return ()
    cells = []
    for name, kind in _CELLS:
        for row in answers.get(name, ()):
            rank, step, sites = (int(row[key]) for key in ("rank", "step", "site_count"))
            cells.append(Cell(rank, step, kind, float(row.get("z", math.inf)), sites))
    return tuple(sorted(cells, key=lambda cell: -cell.z)[:_MOST_CELLS])


# The share of all ranks beyond which it is no fault of ranks.
_MOST_ACCUSED = 0.25
_MANY_VOTES = 20_000_000
_MOST_SITES = 64

_SWAP = (
    "take the rank's device out of service and test it (a burn-in with the same kernels); go on "
    "from a checkpoint before step {step:,}"
)
_OTHER_DATA = "a rank that trains on a different kind of data can look the same"
Row = dict[str, Any]


def examine(
    engine: Engine,
    run: str,
    kind: str,
    *,
    are_replicas: bool = False,
    lag: int = 2,
    with_cells: bool = False,
) -> FleetReport:
    """The findings on a run. ``lag``: so many steps a rank may be behind the others.
    ``are_replicas``: ranks whose replica group is unknown hold the same weights. ``with_cells``:
    also what is unusual of each rank in each step, for the page.

    Raises:
        LogError: there is no row, or a row without a step, a site, a rank or a call.
        ConfigError: a rank is negative, or 2 ** 20 or more.
    """
    answers = _answers(engine, are_replicas)
    if with_cells:
        answers.update(cell_answers(engine))
    ranks = {int(row["rank"]): _rank(row) for row in answers["ranks"]}
    known = {int(row["site"]): str(row["name"]) for row in answers["sites"]}
    names = defaultdict(lambda: "a site without a name", known)
    findings = [
        *_nonfinite(answers, names, len(ranks)),
        *_replicas(answers, names, ranks),
        *_outliers(answers, names, ranks),
        *_steps(answers),
        *_stopped(answers, ranks, lag),
    ]
    findings.sort(key=lambda finding: not finding.is_accusation)
    steps = [(rank.first_step, rank.last_step) for rank in ranks.values()]
    return FleetReport(
        run=run,
        engine=kind,
        ranks=ranks,
        site_count=len(known),
        row_count=sum(rank.row_count for rank in ranks.values()),
        first_step=min(first for first, _ in steps),
        last_step=max(last for _, last in steps),
        findings=tuple(findings),
        cells=unusual_cells(answers),
        steps=tuple(int(row["step"]) for row in answers.get("step_list", ())),
    )


def _answers(engine: Engine, are_replicas: bool) -> dict[str, list[Row]]:
    options: dict[str, Any] = {"are_replicas": are_replicas}
    for name, text in TABLES_IN_ORDER.items():
        if name == "votes":
            held = engine.ask("SELECT sum(copies) AS held FROM disagreeing")[0]["held"] or 0
            options["first_steps"] = 3 if held > _MANY_VOTES else 1 << 30
        elif name == "ranks":
            _check_rows(engine)
            _check_ranks(engine)
        conditions = _spans(engine) if name == "spread" else ["r.step >= 0"]
        for number, steps in enumerate(conditions):
            select = statement(text, engine.dialect, steps=steps, **options)
            engine.make(name, select, is_more=number > 0)
    answers = {
        name: engine.ask(statement(text, engine.dialect))
        for name, text in ANSWERS.items()
        if name != "nonfinite" or is_any_bad(engine)
    }
    fewest = fewest_steps(answers)
    sites = {int(row["site"]) for row in answers["outliers"] if int(row["steps"]) >= fewest}
    if sites:
        # An outlier hides a lesser outlier at its place and step, until all are looked at.
        steps_at: dict[int, int] = defaultdict(int)
        for row in answers["outliers"]:
            steps_at[int(row["site"])] += int(row["steps"])
        kept = sorted(sites, key=lambda site: -steps_at[site])[:_MOST_SITES]
        engine.make("all_outlying", statement(ALL_OUTLYING, engine.dialect, sites=kept))
        for name in ("outliers", "outlying_steps"):
            select = statement(ANSWERS[name], engine.dialect, outlying="all_outlying")
            answers[name] = engine.ask(select)
    return answers


def _check_rows(engine: Engine) -> None:
    keys = " OR ".join(f"{name} IS NULL" for name in KEYS)
    if engine.ask(f"SELECT count(*) AS lost FROM records WHERE {keys}")[0]["lost"]:
        raise LogError(f"there are rows without one of {', '.join(KEYS)}")
    if not engine.ask("SELECT count(*) AS ranks FROM progress")[0]["ranks"]:
        raise LogError("this run has no record")


def _check_ranks(engine: Engine) -> None:
    bounds = engine.ask("SELECT min(rank) AS low, max(rank) AS high FROM progress")[0]
    low, high = int(bounds["low"]), int(bounds["high"])
    if low < 0 or high >= RANK_LIMIT:
        raise ConfigError(
            f"the ranks of a run must be from 0 to {RANK_LIMIT - 1:,}, got ranks from {low:,} to "
            f"{high:,}; another job is another --run"
        )


def _spans(engine: Engine) -> list[str]:
    """Conditions on the step that divide the work: quartiles are of values held in memory."""
    if engine.chunk_rows is None:
        return ["r.step >= 0"]
    extent = engine.ask(
        "SELECT sum(row_count) AS n, min(first_step) AS low, max(last_step) AS high FROM progress"
    )[0]
    low, high = int(extent["low"]), int(extent["high"])
    count = max(1, min(math.ceil(extent["n"] / engine.chunk_rows), high - low + 1))
    ends = [low + (high + 1 - low) * i // count for i in range(count + 1)]
    return [f"r.step BETWEEN {a} AND {b - 1}" for a, b in zip(ends, ends[1:]) if b > a]


def _rank(row: Row) -> FleetRank:
    texts = ("node", "host", "device", "serial", "replica_group")
    numbers = ("rank", "first_step", "last_step", "row_count")
    fields: dict[str, Any] = {name: row[name] for name in texts}
    fields.update({name: int(row[name]) for name in numbers})
    return FleetRank(**fields)


def _nonfinite(
    answers: dict[str, list[Row]], names: Mapping[int, str], count: int
) -> list[FleetFinding]:
    rows = answers.get("nonfinite", [])
    if not rows:
        return []
    step = int(rows[0]["step"])
    firsts: dict[int, Row] = {}
    for row in rows:
        firsts.setdefault(int(row["rank"]), row)
    place = (rows[0]["position"], rows[0]["site"])
    first = [row for row in firsts.values() if (row["position"], row["site"]) == place]
    suspects = tuple(
        Suspect(
            int(row["rank"]),
            step,
            names[int(row["site"])],
            f"{row['nan_count']:,} NaN and {row['inf_count']:,} infinities, the first of all ranks",
        )
        for row in first
    )
    if len(first) > max(1, count * _MOST_ACCUSED):
        what = (
            f"the first NaN or infinity is on {len(first):,} ranks at once, in step {step:,}: "
            "a step, not a rank"
        )
        advice = (
            "look at what all ranks share: the loss, the learning rate, the range of the dtype "
            "(fastcheck show on one of the logs)"
        )
        return [FleetFinding("step", False, what, advice, step, suspects[:3])]
    later = len(firsts) - len(first)
    spread = f"; {counted(later, 'other rank')} had one later in that step" if later else ""
    what = "the first NaN or infinity of the run"
    advice = (
        "run fastcheck show on this rank's log to see what it was computed from; if that was "
        "finite, run the same batch on another device, " + _SWAP.format(step=step)
    )
    return [FleetFinding("nonfinite", True, what + spread, advice, step, suspects)]


def _replicas(
    answers: dict[str, list[Row]], names: Mapping[int, str], ranks: Mapping[int, FleetRank]
) -> list[FleetFinding]:
    odd: list[Suspect] = []
    pairs: dict[int, list[Suspect]] = defaultdict(list)
    for row in answers["replicas"]:
        most, total, cells = int(row["most"]), int(row["total"]), int(row["cells"])
        is_outvoted = 2 * int(row["outvoted"]) > cells
        places = f"{counted(cells, 'reading')} of {counted(int(row['site_count']), 'weight')}"
        how = (
            f"{most:,} of {total:,} replicas hold the same bits, this rank others ({places})"
            if is_outvoted
            else f"no majority among {total:,} replicas ({places})"
        )
        site = names[int(row["site"])]
        suspect = Suspect(int(row["rank"]), int(row["first_step"]), site, how, cells)
        if is_outvoted:
            odd.append(suspect)
        else:
            pairs[int(row["peer_group"])].append(suspect)
    findings = []
    if odd:
        step = min(suspect.first_step for suspect in odd)
        is_few = len(odd) <= max(1, len(ranks) * _MOST_ACCUSED)
        what = "a weight differs from that of the replicas"
        if not is_few:
            what = f"{len(odd):,} ranks hold other weights than their replicas: no single rank"
        findings.append(_replica_finding(odd, what, is_few, step))
    for group in pairs.values():
        step = min(suspect.first_step for suspect in group)
        is_pair = len(group) == 2
        what = "two replicas differ: one of these two"
        if not is_pair:
            what = f"{len(group):,} replicas differ, without a majority"
        findings.append(_replica_finding(group, what, is_pair, step))
    return findings + _uncompared(ranks)


def _uncompared(ranks: Mapping[int, FleetRank]) -> list[FleetFinding]:
    """A remark where weights are compared with those of no other rank."""
    unknown = [rank for rank in ranks.values() if rank.replica_group is None]
    if not unknown or len(ranks) < 2:
        return []
    of = counted(len(unknown), "rank")
    what = f"the weights of {of} are not compared: the replica group is unknown"
    advice = (
        "with plain data parallelism, --replicas all compares them with each other; else set "
        "FASTCHECK_PLACEMENT in the launcher"
    )
    return [FleetFinding("replicas", False, what, advice, 0)]


def _replica_finding(
    suspects: list[Suspect], what: str, is_accusation: bool, step: int
) -> FleetFinding:
    suspects = sorted(suspects, key=lambda suspect: (suspect.first_step, suspect.rank))
    together = (
        "if the weights differ from the first step on, look for different seeds, weights that were "
        "not broadcast, or a parameter that data parallelism does not manage"
    )
    advice = _SWAP.format(step=step) if is_accusation else together
    return FleetFinding("replicas", is_accusation, what, advice, step, tuple(suspects))


def _outliers(
    answers: dict[str, list[Row]], names: Mapping[int, str], ranks: Mapping[int, FleetRank]
) -> list[FleetFinding]:
    by_rank = grouped(answers["outliers"], lambda row: int(row["rank"]))
    fewest = fewest_steps(answers)
    steps_of = Counter(int(row["rank"]) for row in answers["outlying_steps"])
    usual = usual_count([steps_of[rank] for rank in ranks])
    rank_limit = fewest_by_chance(usual, len(ranks))
    suspects = []
    order = {site: number for number, site in enumerate(names)}
    for rank, places in by_rank.items():
        worst = max(places, key=lambda row: (int(row["steps"]), float(row["z"])))
        if int(worst["steps"]) < fewest and steps_of[rank] < rank_limit:
            continue
        sites = f" and {len(places) - 1:,} more sites" if len(places) > 1 else ""
        telling = [row for row in places if int(row["steps"]) >= fewest] or [worst]
        first = min(int(row["first_step"]) for row in telling)
        # A result computed from a wrong value is off as well, and often further off.
        named = min(
            (row for row in telling if int(row["first_step"]) == first),
            key=lambda row: order.get(int(row["site"]), len(order)),
        )
        how = (
            f"{int(named['steps']):,} steps up to {int(named['last_step']):,}, "
            f"{float(named['factor']):.3g} times the median of {int(named['peers']):,} peers, "
            f"up to {float(named['z']):.0f} robust standard deviations"
        )
        site = names[int(named["site"])] + sites
        suspects.append(Suspect(rank, first, site, how, len(places)))
    return _by_host(suspects, ranks)


def _by_host(suspects: list[Suspect], ranks: Mapping[int, FleetRank]) -> list[FleetFinding]:
    suspects = sorted(suspects, key=lambda suspect: (suspect.first_step, suspect.rank))
    if not suspects:
        return []
    if len(suspects) > max(1, len(ranks) * _MOST_ACCUSED):
        what = f"{len(suspects):,} ranks are far from the others: no single rank"
        advice = (
            "check whether these ranks have other data, or hold other parts of the model; if "
            "so, set their placement (FASTCHECK_PLACEMENT)"
        )
        few = tuple(suspects[:3])
        return [FleetFinding("outlier", False, what, advice, few[0].first_step, few)]
    sizes = Counter(at.host for at in ranks.values() if at.host)
    by_host = grouped(suspects, lambda suspect: ranks[suspect.rank].host or "")
    findings = []
    for host, group in by_host.items():
        step = group[0].first_step
        if host and len(group) >= 2 and 2 * len(group) >= sizes[host] and len(sizes) > 1:
            advice = (
                f"take host {host} out of service; go on from a checkpoint before step {step:,}"
            )
            what = f"host {host}: {len(group)} of its {sizes[host]} ranks are far from their peers"
            findings.append(FleetFinding("host", True, what, advice, step, tuple(group), host))
        else:
            for member in group:
                what = "a rank is repeatedly far from its peers"
                advice = f"{_SWAP.format(step=member.first_step)}; {_OTHER_DATA}"
                found = FleetFinding("outlier", True, what, advice, member.first_step, (member,))
                findings.append(found)
    return findings


def _steps(answers: dict[str, list[Row]]) -> list[FleetFinding]:
    """One finding for each stretch of steps, because a median that jumps often returns in the next
    step.
    """
    stretches: list[list[Row]] = []
    for row in answers["steps"]:
        if not stretches or int(row["step"]) != int(stretches[-1][-1]["step"]) + 1:
            stretches.append([])
        stretches[-1].append(row)
    findings = []
    for rows in stretches[:10]:
        step, last = int(rows[0]["step"]), int(rows[-1]["step"])
        moved, of = (int(rows[0][name]) for name in ("moved", "site_count"))
        more = f" (until step {last:,})" if last > step else ""
        what = (
            f"step {step:,}: the median of all ranks moved at {moved:,} of {of:,} sites, by a "
            f"factor of {float(rows[0]['factor']):.3g}{more}: a step, not a rank"
        )
        advice = "look at the batch and at the learning rate of that step"
        findings.append(FleetFinding("step", False, what, advice, step))
    return findings


def _stopped(
    answers: dict[str, list[Row]], ranks: Mapping[int, FleetRank], lag: int
) -> list[FleetFinding]:
    findings = []
    ordered = sorted(rank.last_step for rank in ranks.values())
    last = ordered[len(ordered) // 2]
    behind = [rank for rank in ranks.values() if rank.last_step < last - lag]
    by_node = grouped(ranks.values(), lambda rank: rank.node)
    waiting = [
        rank
        for rank in behind
        if len(by_node[rank.node]) > 1 and len({at.last_step for at in by_node[rank.node]}) == 1
    ]
    stopped = [rank for rank in behind if rank not in waiting]
    for group, is_accusation in ((stopped, True), (waiting, False)):
        if not group:
            continue
        who = "one rank" if len(group) == 1 else f"{len(group):,} ranks"
        what = f"{who} stopped writing records while the others went on to step {last:,}"
        advice = (
            "check whether the process is alive and where it waits (py-spy dump), on this rank and "
            "on those that it exchanges data with"
        )
        if not is_accusation:
            what = f"all ranks of a node end before step {last:,}"
            advice = "check whether fastcheck collect runs there; if it does, the node has stopped"
        suspects = tuple(
            Suspect(
                rank.rank, rank.last_step + 1, "all sites", f"last record: step {rank.last_step:,}"
            )
            for rank in sorted(group, key=lambda rank: (rank.last_step, rank.rank))
        )
        first = suspects[0].first_step
        findings.append(FleetFinding("stopped", is_accusation, what, advice, first, suspects))
    sizes = {int(row["world_size"]) for row in answers["ranks"] if row["world_size"] is not None}
    missing = sorted(set(range(max(sizes, default=0))) - set(ranks))
    if missing:
        named = listed(missing, 10, ", ...")
        what = f"{len(missing):,} of {max(sizes):,} ranks have no records: {named}"
        advice = "collect the logs of all nodes; if that is done, these ranks have written nothing"
        findings.append(FleetFinding("stopped", False, what, advice, 0))
    return findings
