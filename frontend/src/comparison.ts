// The page of two runs, dumps or checkpoints: where they part, and by how much.
import { curves, type Line, lineColour } from "./curves";
import { h, plainTable, scrolling, section } from "./dom";
import { differenceCells, formatTimes, stepText } from "./difference";
import { formatCount, formatNumber } from "./format";
import { heatmap } from "./heatmap";
import { type Cell, type ComparisonHeader, type Model, type Pair, range, toNumber } from "./model";
import { pairDetail } from "./pairs";
import { type Column, number, type SiteColumns, sites } from "./sites";
import { aligned, NUMBERS } from "./steps";
import type { Store } from "./store";

/** Fewer steps are a list, not a picture. */
const FEWEST_COLUMNS = 3;
const MOST_RANKS = 3;

export function comparisonParts(store: Store): (HTMLElement | null)[] {
  const { model } = store;
  const compared = model.header.comparison!;
  if (!model.rowCount) return [];
  const isMap = model.header.axis.starts.length >= FEWEST_COLUMNS;
  return [
    parted(store, compared),
    isMap ? heatmap(store, differenceCells(model)) : profile(store),
    pairDetail(store),
    numbers(store, compared),
    pairTable(compared),
    sites(store, DIFFERENCES),
  ];
}

function parted(store: Store, compared: ComparisonHeader): HTMLElement {
  const { model } = store;
  if (!compared.parted.length) {
    return section("parted", "Where they part", h("p", {}, "Nothing that was compared differs."));
  }
  const when = (one: number | null): number => one ?? Number.POSITIVE_INFINITY;
  const ordered = [...compared.parted].sort(
    (one, other) =>
      when(one.first_different) - when(other.first_different) ||
      when(one.first_inexact) - when(other.first_inexact),
  );
  const value = (cell: Cell): string =>
    cell === "yes" || cell === "no" ? cell : cell === null ? "–" : formatNumber(toNumber(cell));
  const rows = ordered.map((one) => [
    one.signal,
    stepText(one.first_inexact),
    stepText(one.first_different),
    value(one.actual),
    value(one.reference),
    one.row < 0 ? "–" : open(store, one.row, one.first_different ?? one.first_inexact ?? 0),
  ]);
  const first = ordered[0]!;
  const signal = first.signal.replace("tensors: ", "");
  const sentence =
    first.first_different === null
      ? `No difference is beyond its limit. The first signal that is not equal is ${signal}, ` +
        `${inWords(first.first_inexact)}.`
      : `The runs part ${inWords(first.first_different)}, first in ${signal}` +
        `${first.row < 0 ? "" : ` (${model.name(first.row)})`}.`;
  const table = plainTable(
    "Values are those of the first step that is not equal. The limit of a step's loss, norm or rate is 1 %.",
    [
      "signal",
      "not equal from step",
      "beyond its limit from step",
      "actual",
      "reference",
      "tensor",
    ],
    rows,
    new Set([1, 2, 3, 4]),
  );
  table.id = "parted-table";
  return section(
    "parted",
    "Where they part",
    h("p", { id: "parted-first" }, sentence),
    scrolling("Where each signal parts", table),
  );
}

function inWords(step: number | null): string {
  return step === null || step < 0 ? "before the first step" : `at step ${formatCount(step)}`;
}

function open(store: Store, row: number, step: number): HTMLElement {
  const choose = (): void => store.open(row, step);
  return h("button", { type: "button", class: "link", onClick: choose }, store.model.name(row));
}

/** Of a dump or a checkpoint: the tensors in their order, and how far each is apart. */
function profile(store: Store): HTMLElement {
  const { model } = store;
  const body = h("div");
  const show = (): void => {
    const values = range(model.rowCount).map((row) => {
      const worst = model.number("worst", row);
      return worst > 0 ? Math.min(Math.max(worst, 2 ** -20), 2 ** 40) : null;
    });
    const chart = curves({
      title: "error over its limit, by the order of the tensors",
      steps: range(model.rowCount).map((row) => row + 1),
      lines: [{ label: "error over its limit", values, colour: lineColour(0) }],
      isLogarithmic: true,
      format: formatTimes,
      xName: "tensor",
    });
    body.replaceChildren(chart ?? h("p", {}, "All pairs are equal to the bit."));
  };
  show();
  store.onTheme(show);
  const hint =
    "1 is the limit of the tensor's dtype. Pairs that are equal to the bit have no point.";
  return section("profile", "How far each tensor is apart", h("p", { class: "hint" }, hint), body);
}

/** Loss, scale, norm and learning rate of both sides. */
function numbers(store: Store, compared: ComparisonHeader): HTMLElement | null {
  const { model } = store;
  if (!compared.is_timed) return null;
  const body = h("div", { class: "charts" });
  const show = (): void => {
    const shown = model.ranks.slice(0, MOST_RANKS);
    const sides = [
      ["actual", model.header.steps],
      ["reference", compared.reference_steps],
    ] as const;
    const all = sides.flatMap(([, steps]) => shown.flatMap((rank) => steps[rank]?.step ?? []));
    const axis = [...new Set(all)].sort((one, other) => one - other);
    const charts = NUMBERS.map(([key, title, isLogarithmic]) => {
      const lines = shown.flatMap((rank, at) =>
        sides.map(([side, steps], which): Line => {
          const mine = steps[rank];
          const name = model.hasSeveralRanks ? `${side}, rank ${rank}` : side;
          return {
            label: name,
            values: aligned(mine, mine?.[key] ?? [], axis),
            colour: lineColour(2 * at + which),
            ...(which ? { dash: [5, 3] } : {}),
          };
        }),
      );
      const chosen = model.header.first?.step ?? null;
      return curves({ title, steps: axis, lines, isLogarithmic, chosen });
    }).filter((one) => one !== null);
    body.replaceChildren(
      ...(charts.length ? charts : [h("p", {}, "Neither log holds a loss or norm.")]),
    );
  };
  show();
  store.onTheme(show);
  return section("steps", "Steps of both runs", body);
}

/** The pairs of a dump or a checkpoint that differ, call by call, with both sides' values. */
function pairTable(compared: ComparisonHeader): HTMLElement | null {
  const { pairs, pair_count: count } = compared;
  if (!pairs.length) return null;
  const side = (pair: Pair, key: "min" | "max" | "mean"): string =>
    [pair.actual, pair.reference]
      .map((one) => (one ? formatNumber(toNumber(one[key])) : "not there"))
      .join(" / ");
  const kind = (pair: Pair): string => {
    const texts = [pair.actual, pair.reference].map((one) =>
      one ? `${one.dtype ?? "?"}${one.shape ? ` ${one.shape.join("×") || "scalar"}` : ""}` : "–",
    );
    return texts[0] === texts[1] ? texts[0]! : texts.join(" / ");
  };
  const rows = pairs.map((pair) => [
    pair.question,
    `${pair.name}${pair.call ? ` #${pair.call}` : ""}`,
    pair.state.replace("_", " "),
    formatNumber(toNumber(pair.error)),
    formatNumber(toNumber(pair.max_abs)),
    formatNumber(toNumber(pair.max_ulp)),
    formatNumber(toNumber(pair.cosine)),
    kind(pair),
    side(pair, "min"),
    side(pair, "max"),
    side(pair, "mean"),
    pair.reason || "–",
  ]);
  const more = count > pairs.length ? `, the first ${formatCount(pairs.length)} shown` : "";
  const table = plainTable(
    `${formatCount(count)} pairs that differ or have no partner, in their order${more}: actual / reference.`,
    [
      "question",
      "tensor",
      "state",
      "error",
      "max abs",
      "max ulp",
      "cosine",
      "dtype, shape",
      "min",
      "max",
      "mean",
      "reason",
    ],
    rows,
    new Set([3, 4, 5, 6, 8, 9, 10]),
  );
  table.id = "pair-table";
  return section("pairs", "Pairs that differ", scrolling("Pairs that differ", table));
}

function steps(title: string, field: string): Column {
  return {
    title,
    isNumber: true,
    key: (model, row) => {
      const step = model.number(field, row);
      return step < -1 ? Number.NaN : step;
    },
    text: (model, row) => stepText(model.number(field, row)),
  };
}

function text(title: string, of: (model: Model, row: number) => string): Column {
  return { title, isNumber: false, key: of, text: of };
}

const DIFFERENCES: SiteColumns = {
  title: "Tensors of both sides",
  caption: "Every pair of tensors, over all steps. Click a name to show it.",
  columns: [
    {
      title: "tensor",
      isNumber: false,
      key: (_, row) => row,
      text: (model, row) => model.name(row),
    },
    text(
      "question",
      (model, row) => model.header.comparison!.questions[model.number("phase", row)] ?? "",
    ),
    text("dtype", (model, row) => model.dtype(row)),
    number("pairs", "records", formatCount),
    number("different", "different", formatCount),
    steps("not equal from step", "first_inexact"),
    steps("different from step", "first_different"),
    number("times its limit", "worst", formatTimes),
    steps("at step", "worst_step"),
    number("abs max", "peak", formatNumber),
    number("reference's", "reference_peak", formatNumber),
    text("state", (model, row) => model.verdicts[row] ?? ""),
  ],
  stepOf: (model, row) => {
    const found = ["first_different", "first_inexact", "last_step"].map((name) =>
      model.number(name, row),
    );
    return found.find((step) => step >= -1) ?? 0;
  },
  isOrdinary: (verdict) => verdict === "equal to the bit" || verdict === "within the limits",
};
