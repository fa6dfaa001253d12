// The chosen tensor of a comparison: the curves of both sides, one over the other.
import { curves, type Line, lineColour } from "./curves";
import { formatTimes, stepText } from "./difference";
import { h, plainTable, scrolling, section } from "./dom";
import { formatCount, formatNumber, formatShare } from "./format";
import { type Model, range, STATISTICS, type Statistic } from "./model";
import type { Store } from "./store";

const TITLES: Record<Statistic, string> = {
  abs_max: "abs max",
  rms: "rms",
  mean: "mean",
  zero_share: "share of zeros",
};
const BEFORE = 8;
const AFTER = 4;

export function pairDetail(store: Store): HTMLElement {
  const body = h("div", {}, h("p", { class: "hint" }, "No tensor is chosen."));
  const show = (): void => {
    if (store.chosen)
      body.replaceChildren(...content(store.model, store.chosen.row, store.chosen.step));
  };
  store.onChosen(show);
  store.onTheme(show);
  return section("site", "Tensor", body);
}

function content(model: Model, row: number, step: number): HTMLElement[] {
  const hasCurves = model.header.axis.starts.length > 1;
  const charts = hasCurves
    ? [
        ...STATISTICS.map((statistic) => chart(model, statistic, row, step)),
        excess(model, row, step),
      ]
    : [];
  return [
    h("h3", { id: "site-name" }, model.name(row)),
    facts(model, row),
    h("div", { class: "charts" }, ...charts.filter((one) => one !== null)),
    around(model, row, step),
  ];
}

function facts(model: Model, row: number): HTMLElement {
  const reason = model.header.comparison!.reasons[model.number("reason", row)] ?? "";
  const worst = model.number("worst", row);
  const pairs: [string, string][] = [
    ["dtype", model.dtype(row)],
    ["elements", formatCount(model.number("numel", row))],
    ["pairs", formatCount(model.number("records", row))],
    ["equal to the bit", formatCount(model.number("same", row))],
    ["not equal from step", stepText(model.number("first_inexact", row))],
    ["different from step", stepText(model.number("first_different", row))],
    ["largest error, times its limit", worst > 0 ? formatTimes(worst) : "–"],
    ["at step", stepText(model.number("worst_step", row))],
    ["state", model.verdicts[row] ?? ""],
    ...(reason ? [["because", reason] as [string, string]] : []),
  ];
  const items = pairs.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)));
  return h("dl", { class: "facts" }, ...items);
}

function chart(model: Model, statistic: Statistic, row: number, step: number): HTMLElement | null {
  const axis = model.axisOf(statistic);
  const columns = range(axis.starts.length);
  const values = (plane: string): (number | null)[] =>
    columns.map((column) => {
      const value = model.cell(plane, row, column);
      return Number.isFinite(value) ? value : null;
    });
  const lines = ["", "reference."].map((prefix, at): Line => {
    const line: Line = {
      label: at ? "reference" : "actual",
      values: values(`${prefix}${statistic}.high`),
      colour: lineColour(at),
      ...(at ? { dash: [5, 3] } : {}),
    };
    if (model.has(`${prefix}${statistic}.low`)) line.low = values(`${prefix}${statistic}.low`);
    return line;
  });
  return curves({
    title: TITLES[statistic],
    steps: axis.starts,
    lines,
    isLogarithmic: statistic === "abs_max" || statistic === "rms",
    chosen: step,
    ...(statistic === "zero_share" ? { format: formatShare } : {}),
  });
}

function excess(model: Model, row: number, step: number): HTMLElement | null {
  const { starts } = model.header.axis;
  const values = range(starts.length).map((column) => {
    const value = model.cell("excess", row, column);
    return value > 0 ? Math.min(Math.max(value, 2 ** -20), 2 ** 40) : null;
  });
  return curves({
    title: "error over its limit",
    steps: starts,
    lines: [{ label: "error over its limit", values, colour: lineColour(3) }],
    isLogarithmic: true,
    chosen: step,
    format: formatTimes,
  });
}

function around(model: Model, row: number, step: number): HTMLElement {
  const { starts, width } = model.header.axis;
  const at = model.column(step);
  const columns = range(starts.length).slice(Math.max(at - BEFORE, 0), at + AFTER + 1);
  const mark = model.header.exact ? "" : "≈ ";
  const rows = columns.map((column) => {
    const start = starts[column]!;
    const name = width > 1 ? `${start} to ${start + width - 1}` : stepText(start);
    const both = (["abs_max", "rms", "mean"] as const).flatMap((statistic) => {
      const found = statistic === "abs_max" ? column : model.column(start, model.axisOf(statistic));
      return ["", "reference."].map((prefix) => {
        const value = model.cell(`${prefix}${statistic}.high`, row, found);
        return Number.isNaN(value) ? "–" : `${mark}${formatNumber(value)}`;
      });
    });
    const times = model.cell("excess", row, column);
    return [
      column === at ? h("strong", {}, name) : name,
      ...both,
      Number.isNaN(times) ? "–" : times === 0 ? "equal" : formatTimes(times),
    ];
  });
  const table = plainTable(
    `Around step ${stepText(step)}: actual, then the reference.`,
    [
      "step",
      "abs max",
      "reference",
      "rms",
      "reference",
      "mean",
      "reference",
      "error over its limit",
    ],
    rows,
    new Set([0, 1, 2, 3, 4, 5, 6, 7]),
  );
  table.id = "around";
  return scrolling("Steps around the chosen one", table);
}
