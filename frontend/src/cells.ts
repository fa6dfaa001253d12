// What the cells of a run's heat map show: colours, and a cell in words.
import type { Mode } from "./colours";
import { formatBits, formatCounts, formatNumber } from "./format";
import type { Model } from "./model";
import { scores } from "./scores";
import { watchedIn } from "./watched";

/** What a heat map shows of a model. */
export interface Cells {
  title: string;
  hint: string;
  modes: [Mode, string][];
  firstMode: Mode;
  scores(mode: Mode): Float32Array;
  describe(row: number, column: number): string;
}

export function runCells(model: Model): Cells {
  const { header } = model;
  const isNarrow = header.rows.dtype!.some((code) => {
    const max = header.dtypes[Number(code)]?.max;
    return max != null && Number(max) < 1e6;
  });
  return {
    title: "Layers by steps",
    hint: "Click a cell, or move with the arrow keys and press Enter, to show the curves of its site.",
    modes: [
      ["headroom", "headroom"],
      ["unusual", "unusual for its site"],
      ["magnitude", "abs max"],
    ],
    firstMode: isNarrow ? "headroom" : "unusual",
    scores: (mode) => scores(model, mode),
    describe: (row, column) => describe(model, row, column),
  };
}

function describe(model: Model, row: number, column: number): string {
  const { width } = model.header.axis;
  const step = model.header.axis.starts[column] ?? 0;
  const steps = stepsOf(model, column);
  const watched = watchedIn(model, row, step, width).map((event) => event.kind.replace("_", " "));
  if (!model.wasSeen(row, column))
    return [`${model.name(row)}, ${steps}: not read`, ...watched].join(", ");
  const value = model.high("abs_max", row, column);
  const headroom = model.limitBits(row) - Math.log2(value);
  const bad = formatCounts(model.counts(row, step, width));
  const parts = [
    `${model.name(row)}, ${steps}: abs max ${formatNumber(value)} ${model.dtype(row)}`,
    ...(Number.isFinite(headroom) ? [`headroom ${formatBits(headroom)}`] : []),
    ...(model.isBad(row, column) ? [bad || "not finite"] : []),
    ...watched,
  ];
  return parts.join(", ");
}

/** The steps of a column in words. */
export function stepsOf(model: Model, column: number): string {
  const { starts, width } = model.header.axis;
  const step = starts[column] ?? 0;
  if (step < 0 && width === 1) return "before the first step";
  return width > 1 ? `steps ${step} to ${step + width - 1}` : `step ${step}`;
}
