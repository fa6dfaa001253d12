"""The questions to a fleet, in SQL that DuckDB and Spark take.

``TABLES_IN_ORDER`` are made one after the other, ``ANSWERS`` read them. They read ``records`` (the
files of all nodes), ``all_sites`` and ``all_ranks`` (the small tables). What differs between the
engines is in ``DIALECTS``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fastcheck.record.format import NONFINITE_COUNTS, Verdict

#: Robust standard deviations from the median of its peers beyond which a row is an outlier; more
#: among few peers, whose quartiles are rough.
Z_LIMIT = 6.0
#: Beyond the last rank that the statements can tell from others.
RANK_LIMIT = 1 << 20
#: The least number of peers in a step: fewer are not compared.
FEWEST_PEERS = 8


@dataclass(frozen=True)
class Dialect:
    """The spelling in an engine of what SQL engines spell differently.

    ``quartiles`` and ``median`` are of ``{x}``; ``part`` is one of the three quartiles, ``{i}``
    counting from 0.
    """

    quartiles: str
    part: str
    median: str


DIALECTS = {
    "duckdb": Dialect(
        quartiles="quantile_cont({x}, [0.25, 0.5, 0.75])",
        part="q[{i} + 1]",
        median="quantile_cont({x}, 0.5)",
    ),
    "spark": Dialect(
        quartiles="percentile({x}, array(0.25, 0.5, 0.75))",
        part="q[{i}]",
        median="percentile({x}, 0.5)",
    ),
}

# Values that were intended, went nowhere, or carried a loss scale.
_HARMLESS = ", ".join(
    str(verdict.value)
    for verdict in (Verdict.INTENDED, Verdict.ABSORBED, Verdict.SCALED, Verdict.BENIGN)
)
_BAD = f"r.nan_count + r.posinf_count + r.neginf_count > 0 AND r.verdict NOT IN ({_HARMLESS})"
# A condition on one column, by whose extremes an engine leaves out what a file has none of.
_ONE_BAD = "\n    UNION ALL\n".join(
    f"    SELECT rank, step FROM records WHERE {name} > 0 AND verdict NOT IN ({_HARMLESS})"
    for name in NONFINITE_COUNTS
)

_PROGRESS = f"""\
SELECT p.rank, p.first_step, p.last_step, p.row_count, b.first_bad
FROM (
    SELECT rank, min(step) AS first_step, max(step) AS last_step, count(*) AS row_count
    FROM records
    GROUP BY rank
) p
LEFT JOIN (
    SELECT rank, min(step) AS first_bad
    FROM (
{_ONE_BAD}
    ) bad
    GROUP BY rank
) b ON p.rank = b.rank"""

# Sites are numbered when a module is watched, forward and backward of it one after the other. In a
# step all of forward comes first.
_SITES = """\
SELECT site, min(position + CASE direction WHEN 'forward' THEN 0 WHEN 'backward' THEN 1000000000
                 ELSE 2000000000 END) AS position, min(name) AS name, min(role) AS role
FROM all_sites
GROUP BY site"""

_RANKS = """\
SELECT p.rank, k.node, k.host, k.device, k.serial, k.world_size, k.replica_group,
       dense_rank() OVER (ORDER BY coalesce(k.replica_group, '')) AS peer_group
FROM progress p
LEFT JOIN (
    SELECT rank, max(node) AS node, max(host) AS host, max(device) AS device,
           max(serial) AS serial, max(world_size) AS world_size,
           max({replica_group}) AS replica_group
    FROM all_ranks
    GROUP BY rank
) k ON p.rank = k.rank"""

_DISAGREEING = """\
SELECT r.step, r.site, r.call, k.peer_group, count(*) AS copies
FROM records r
JOIN ranks k ON r.rank = k.rank
JOIN sites s ON r.site = s.site
WHERE s.role = 'param' AND k.replica_group IS NOT NULL AND r.checksum IS NOT NULL
GROUP BY r.step, r.site, r.call, k.peer_group
HAVING min(r.checksum) <> max(r.checksum)"""

# The first steps hold all that there is to know if replicas differ from some step on. A rank that
# reads a weight twice in a call, as one with a NaN, has one vote.
_VOTES = """\
SELECT DISTINCT r.step, r.site, r.call, k.peer_group, r.checksum, r.rank
FROM records r
JOIN ranks k ON r.rank = k.rank
JOIN (
    SELECT step, site, call, peer_group,
           row_number() OVER (PARTITION BY site, call, peer_group ORDER BY step) AS number
    FROM disagreeing
) d ON r.step = d.step AND r.site = d.site AND r.call = d.call AND k.peer_group = d.peer_group
WHERE d.number <= {first_steps} AND r.checksum IS NOT NULL"""

_MINORITY = """\
WITH versions AS (
    SELECT step, site, call, peer_group, checksum, count(*) AS votes
    FROM votes
    GROUP BY step, site, call, peer_group, checksum
), cells AS (
    SELECT step, site, call, peer_group, max(votes) AS most, sum(votes) AS total
    FROM versions
    GROUP BY step, site, call, peer_group
)
SELECT v.rank, v.step, v.site, v.peer_group, c.most, c.total, n.votes,
       row_number() OVER (PARTITION BY v.rank ORDER BY v.step, s.position, v.site) AS number,
       count(*) OVER (PARTITION BY v.rank) AS cells
FROM votes v
JOIN versions n ON v.step = n.step AND v.site = n.site AND v.call = n.call
    AND v.peer_group = n.peer_group AND v.checksum = n.checksum
JOIN cells c ON v.step = c.step AND v.site = c.site AND v.call = c.call
    AND v.peer_group = c.peer_group
LEFT JOIN sites s ON v.site = s.site
WHERE n.votes < c.most OR 2 * c.most <= c.total"""

# Files of another program may hold NaN. Engines take it for the largest number, and leave it out of
# the extremes by which they decide that a comparison holds for a whole file.
_IS_NUMBER = "r.rms > 0 AND r.rms - r.rms = 0"

# One double holds a float32 and its rank, in the bits that the float32 leaves: the rank times
# 2 ** -46 of the value is less than half of its last bit below 2 ** 20 ranks. max() of it takes the
# place of max_by() of the rank; of ranks with the same value it is the last, by min() the first.
_KEY = "CAST(r.rms AS DOUBLE) * (1 + r.rank * 1.4210854715202004e-14)"


def _rank_of(key: str) -> str:
    own = f"CAST(CAST({key} AS REAL) AS DOUBLE)"
    return f"CAST(round(({key} / {own} - 1) * 7.0368744177664e13) AS INT)"


# The records of ranks with the same part of the model at one place in one step: the spread of the
# many, and the two at its ends.
_SPREAD = f"""\
SELECT r.step, r.site, k.peer_group, count(*) AS peers, {{quartiles}} AS q,
       max({_KEY}) AS high_key, min({_KEY}) AS low_key
FROM records r
JOIN ranks k ON r.rank = k.rank
JOIN sites s ON r.site = s.site
WHERE s.role <> 'param' AND {_IS_NUMBER} AND {{steps}}
GROUP BY r.step, r.site, k.peer_group
HAVING count(*) >= {FEWEST_PEERS}"""

# Differences of logarithms: a factor of 1.2 is as far as one of 1 / 1.2. 1.349 standard deviations
# lie between the quartiles of a normal distribution; below 0.35 % nothing counts as spread.
_CELLS = f"""\
SELECT step, site, peer_group, peers, ln({{q2}}) AS middle,
       CAST(high_key AS REAL) AS high, {_rank_of("high_key")} AS high_rank,
       CAST(low_key AS REAL) AS low, {_rank_of("low_key")} AS low_rank,
       CASE WHEN (ln({{q3}}) - ln({{q1}})) / 1.349 > 0.0035
            THEN (ln({{q3}}) - ln({{q1}})) / 1.349 ELSE 0.0035 END AS sigma,
       {Z_LIMIT} * (1 + 8.0 / peers) AS z_limit
FROM spread"""

_OUTLYING = """\
SELECT high_rank AS rank, step, site, peers, (ln(high) - middle) / sigma AS z,
       exp(ln(high) - middle) AS factor
FROM cells
WHERE (ln(high) - middle) / sigma > z_limit
UNION ALL
SELECT low_rank AS rank, step, site, peers, (ln(low) - middle) / sigma AS z,
       exp(ln(low) - middle) AS factor
FROM cells
WHERE (middle - ln(low)) / sigma > z_limit"""

#: The table ``all_outlying``: of some sites not only the two ends but all ranks that are outliers.
ALL_OUTLYING = f"""\
SELECT rank, step, site, peers, z, factor
FROM outlying
WHERE site NOT IN ({{sites}})
UNION ALL
SELECT r.rank, r.step, r.site, c.peers, (ln(r.rms) - c.middle) / c.sigma AS z,
       exp(ln(r.rms) - c.middle) AS factor
FROM records r
JOIN ranks k ON r.rank = k.rank
JOIN cells c ON r.step = c.step AND r.site = c.site AND k.peer_group = c.peer_group
WHERE r.site IN ({{sites}}) AND {_IS_NUMBER}
  AND abs((ln(r.rms) - c.middle) / c.sigma) > c.z_limit"""

TABLES_IN_ORDER: dict[str, str] = {
    "progress": _PROGRESS,
    "sites": _SITES,
    "ranks": _RANKS,
    "disagreeing": _DISAGREEING,
    "votes": _VOTES,
    "minority": _MINORITY,
    "spread": _SPREAD,
    "cells": _CELLS,
    "outlying": _OUTLYING,
}

ANSWERS: dict[str, str] = {
    "ranks": """\
SELECT k.rank, k.node, k.host, k.device, k.serial, k.world_size, k.replica_group,
       p.first_step, p.last_step, p.row_count
FROM ranks k
JOIN progress p ON k.rank = p.rank
ORDER BY k.rank""",
    "sites": """\
SELECT site, name FROM sites ORDER BY position, site""",
    "nonfinite": f"""\
SELECT r.rank, r.step, r.site, s.position, r.nan_count,
       r.posinf_count + r.neginf_count AS inf_count
FROM records r
LEFT JOIN sites s ON r.site = s.site
WHERE r.step = (SELECT min(first_bad) FROM progress) AND {_BAD}
ORDER BY s.position, r.site, r.rank
LIMIT 1000""",
    "replicas": """\
SELECT rank, min(step) AS first_step, max(cells) AS cells, count(DISTINCT site) AS site_count,
       sum(CASE WHEN 2 * most > total THEN 1 ELSE 0 END) AS outvoted,
       max(CASE WHEN number = 1 THEN site END) AS site,
       max(CASE WHEN number = 1 THEN most END) AS most,
       max(CASE WHEN number = 1 THEN total END) AS total,
       max(peer_group) AS peer_group
FROM minority
GROUP BY rank
ORDER BY rank""",
    "outliers": """\
SELECT o.rank, o.site, count(*) AS steps, min(o.step) AS first_step, max(o.step) AS last_step,
       max(abs(o.z)) AS z, exp(avg(ln(o.factor))) AS factor, max(o.peers) AS peers
FROM {outlying} o
GROUP BY o.rank, o.site
ORDER BY o.rank, steps DESC, o.site""",
    "outlying_steps": """\
SELECT rank, step, count(*) AS site_count, max(abs(z)) AS z
FROM {outlying}
GROUP BY rank, step
ORDER BY rank, step""",
    "looked_at": """\
SELECT sum(peers) AS row_count, count(DISTINCT step) AS step_count FROM spread""",
    # The move of the middle of all ranks from one step to the next, against what is usual there.
    "steps": """\
WITH level AS (
    SELECT step, site, sum(peers * ln({q2})) / sum(peers) AS level
    FROM spread
    GROUP BY step, site
), moves AS (
    SELECT step, site, level - lag(level) OVER (PARTITION BY site ORDER BY step) AS move
    FROM level
), usual AS (
    SELECT site, {median_move} AS usual
    FROM moves
    WHERE move IS NOT NULL
    GROUP BY site
    HAVING count(*) >= 4
)
SELECT m.step, count(*) AS site_count,
       sum(CASE WHEN abs(m.move) > 9 * u.usual AND abs(m.move) > 0.2 THEN 1 ELSE 0 END) AS moved,
       exp(avg(m.move)) AS factor
FROM moves m
JOIN usual u ON m.site = u.site
WHERE m.move IS NOT NULL
GROUP BY m.step
HAVING 2 * sum(CASE WHEN abs(m.move) > 9 * u.usual AND abs(m.move) > 0.2 THEN 1 ELSE 0 END)
       > count(*)
ORDER BY m.step""",
}

#: The unusual numbers of each rank in each step, beside ANSWERS["outlying_steps"]; for the page.
CELL_ANSWERS: dict[str, str] = {
    "step_list": "SELECT DISTINCT step FROM records ORDER BY step",
    "replica_cells": """\
SELECT rank, step, count(DISTINCT site) AS site_count
FROM minority
GROUP BY rank, step""",
    "bad_cells": f"""\
SELECT r.rank, r.step, count(DISTINCT r.site) AS site_count
FROM records r
WHERE {_BAD}
GROUP BY r.rank, r.step""",
}


def statement(
    text: str,
    dialect: Dialect,
    *,
    steps: str = "r.step >= 0",
    first_steps: int = 1 << 30,
    are_replicas: bool = False,
    outlying: str = "outlying",
    sites: Iterable[int] = (),
) -> str:
    """One of the questions as this engine takes it.

    ``steps``: a condition on the steps of the spread. ``first_steps``: of how many steps at each
    place votes are counted. ``are_replicas``: ranks whose replica group is unknown are one group.
    ``outlying``: the table of outliers. ``sites``: those of ALL_OUTLYING.
    """
    values = {
        "quartiles": dialect.quartiles.format(x="r.rms"),
        "median_move": dialect.median.format(x="abs(move)"),
        "steps": steps,
        "outlying": outlying,
        "sites": ", ".join(map(str, sites)) or "0",
        "first_steps": str(first_steps),
        "replica_group": "coalesce(replica_group, 'all')" if are_replicas else "replica_group",
        **{f"q{i + 1}": dialect.part.format(i=i) for i in range(3)},
    }
    return text.format(**values)
