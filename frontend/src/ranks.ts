// The ranks of a run side by side.
import { h, plainTable, scrolling, section } from "./dom";
import { formatCount, formatNumber } from "./format";
import { type Model, range, toNumber } from "./model";
import type { Store } from "./store";

export function ranks(store: Store): HTMLElement | null {
  const { model } = store;
  if (!model.hasSeveralRanks) return null;
  const rows = model.ranks.map((rank) => cells(store, model, rank));
  const table = plainTable(
    "The loss is that of the rank's last step.",
    [
      "rank",
      "host",
      "sites",
      "records",
      "steps",
      "loss",
      "not finite",
      "first at step",
      "least headroom, bits",
      "of",
    ],
    rows,
    new Set([0, 2, 3, 4, 5, 6, 7, 8]),
  );
  table.id = "rank-table";
  return section("ranks", "Ranks", scrolling("Ranks", table));
}

function cells(store: Store, model: Model, rank: number): (string | Node)[] {
  const mine = range(model.rowCount).filter((row) => model.rank(row) === rank);
  const steps = model.header.steps[rank];
  const records = mine.reduce((sum, row) => sum + model.number("records", row), 0);
  const bad = mine.filter((row) => model.number("bad_records", row) > 0);
  const firsts = bad.map((row) => model.number("first_bad_step", row));
  let worst = -1;
  for (const row of mine) {
    if (
      worst < 0 ||
      model.headroom(row) < model.headroom(worst) ||
      Number.isNaN(model.headroom(worst))
    )
      worst = row;
  }
  const headroom = worst < 0 ? Number.NaN : model.headroom(worst);
  const open = h(
    "button",
    {
      type: "button",
      class: "link",
      onClick: () => store.open(worst, model.number("peak_step", worst)),
    },
    worst < 0 ? "" : model.module(worst),
  );
  return [
    String(rank),
    String(model.header.meta[rank]?.host ?? "–"),
    formatCount(mine.length),
    formatCount(records),
    formatCount(steps?.count ?? 0),
    formatNumber(toNumber(steps?.loss.at(-1) ?? null)),
    `${formatCount(bad.length)} sites`,
    firsts.length ? formatCount(Math.min(...firsts)) : "–",
    Number.isNaN(headroom) ? "–" : headroom.toFixed(1),
    Number.isNaN(headroom) ? "–" : open,
  ];
}
