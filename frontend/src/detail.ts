// The curves of the chosen site, and the steps around the chosen one as a table.
import { curves, type Line, lineColour, spans } from "./curves";
import { h, plainTable, scrolling, section } from "./dom";
import { formatBits, formatCount, formatCounts, formatNumber, formatShare } from "./format";
import { type Model, range, STATISTICS, type Statistic } from "./model";
import type { Store } from "./store";
import { notesOf } from "./watched";

const TITLES: Record<Statistic, string> = {
  abs_max: "abs max",
  rms: "rms",
  mean: "mean",
  zero_share: "share of zeros",
};
const BEFORE = 8;
const AFTER = 4;
const MOST_RANKS = 6;
const MOST_MARKS = 200;

export function detail(store: Store): HTMLElement {
  const body = h("div", {}, h("p", { class: "hint" }, "No site is chosen."));
  const element = section("site", "Site", body);
  const show = (): void => {
    if (!store.chosen) return;
    const { row, step } = store.chosen;
    body.replaceChildren(...content(store.model, row, step));
  };
  store.onChosen(show);
  store.onTheme(show);
  return element;
}

function content(model: Model, row: number, step: number): HTMLElement[] {
  const rows = model
    .rowsOfSite(model.site(row))
    .sort((one, other) => Number(other === row) - Number(one === row))
    .slice(0, MOST_RANKS);
  const charts = STATISTICS.map((statistic) => chart(model, rows, statistic, step));
  return [
    h("h3", { id: "site-name" }, model.name(row)),
    facts(model, row),
    h("div", { class: "charts" }, ...charts.filter((one) => one !== null)),
    around(model, row, step),
  ];
}

function facts(model: Model, row: number): HTMLElement {
  const peak = model.number("peak", row);
  const first = model.number("first_bad_step", row);
  const pairs: [string, string][] = [
    ["dtype", model.dtype(row)],
    ["elements", formatCount(model.number("numel", row))],
    ["records", formatCount(model.number("records", row))],
    ["largest abs max", peak < 0 ? "–" : formatNumber(peak)],
    ["at step", peak < 0 ? "–" : formatCount(model.number("peak_step", row))],
    ["least headroom", formatBits(model.headroom(row))],
    ["first not finite", first < 0 ? "never" : `step ${formatCount(first)}`],
    ["verdict", model.verdicts[row] ?? ""],
  ];
  const items = pairs.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)));
  return h("dl", { class: "facts" }, ...items);
}

function chart(
  model: Model,
  rows: number[],
  statistic: Statistic,
  step: number,
): HTMLElement | null {
  const axis = model.axisOf(statistic);
  const columns = range(axis.starts.length);
  const cell = (value: number): number | null => (Number.isFinite(value) ? value : null);
  const lines = rows.map((row, at): Line => {
    const line: Line = {
      label: model.hasSeveralRanks ? `rank ${model.rank(row)}` : TITLES[statistic],
      values: columns.map((column) => cell(model.high(statistic, row, column))),
      colour: lineColour(at),
    };
    if (model.isThinned(statistic) && at === 0) {
      line.low = columns.map((column) => cell(model.low(statistic, row, column)));
    }
    return line;
  });
  const fine = model.header.axis;
  const bad = range(fine.starts.length).filter((column) => model.isBad(rows[0]!, column));
  return curves({
    title: TITLES[statistic],
    steps: axis.starts,
    lines,
    isLogarithmic: statistic === "abs_max" || statistic === "rms",
    marks: spans(bad, fine.starts).slice(0, MOST_MARKS),
    notes: notesOf(model, rows.slice(0, 1)),
    chosen: step,
    ...(statistic === "zero_share" ? { format: formatShare } : {}),
  });
}

/** The chosen step and those around it: exact near the first event and where the log is small. */
function around(model: Model, row: number, step: number): HTMLElement {
  const axis = model.header.axis;
  const at = model.column(step);
  const columns = range(axis.starts.length).slice(Math.max(at - BEFORE, 0), at + AFTER + 1);
  const rows = columns.map((column) => {
    const start = axis.starts[column]!;
    const values = STATISTICS.map((statistic) => value(model, statistic, row, column));
    const name = axis.width > 1 ? `${start} to ${start + axis.width - 1}` : String(start);
    const label = column === at ? h("strong", {}, name) : name;
    return [label, ...values, formatCounts(model.counts(row, start, axis.width)) || "–"];
  });
  const note = model.header.exact
    ? ""
    : " ≈ marks values that are rounded, or the extremes of several steps.";
  const header = ["step", ...STATISTICS.map((statistic) => TITLES[statistic]), "not finite"];
  const table = plainTable(
    `Around step ${formatCount(step)}.${note}`,
    header,
    rows,
    new Set([0, 1, 2, 3, 4, 5]),
  );
  table.id = "around";
  return scrolling("Steps around the chosen one", table);
}

function value(model: Model, statistic: Statistic, row: number, column: number): string {
  const format = statistic === "zero_share" ? formatShare : formatNumber;
  const fine = model.header.axis;
  const start = fine.starts[column]!;
  if (fine.width === 1) {
    const exact = model.around(statistic, row, start);
    if (exact !== undefined) return format(exact);
  }
  const at = statistic === "abs_max" ? column : model.column(start, model.axisOf(statistic));
  const found = model.high(statistic, row, at);
  return Number.isNaN(found) || model.header.exact ? format(found) : `≈ ${format(found)}`;
}
