// What the cells of a comparison's heat map show: how far both sides are apart.
import { type Cells, stepsOf } from "./cells";
import { formatCount, formatNumber } from "./format";
import type { Model } from "./model";
import { MOST_DIFFERENCE, MOST_RATIO, NOT_FINITE } from "./scores";

export function differenceCells(model: Model): Cells {
  return {
    title: "Difference, layers by steps",
    hint:
      "The limit is the error that rounding may explain in the tensor's dtype. Click a cell, or move " +
      "with the arrow keys and press Enter, to show the curves of both sides.",
    modes: [
      ["difference", "error over its limit"],
      ["ratio", "abs max over that of the reference"],
    ],
    firstMode: "difference",
    scores: (mode) => scores(model, mode === "ratio"),
    describe: (row, column) => describe(model, row, column),
  };
}

function scores(model: Model, isRatio: boolean): Float32Array {
  const columns = model.header.axis.starts.length;
  const made = new Float32Array(model.rowCount * columns);
  const clamp = (value: number, low: number): number => Math.max(low, Math.min(value, 1));
  for (let row = 0; row < model.rowCount; row++) {
    for (let column = 0; column < columns; column++) {
      let score: number;
      if (isRatio) {
        const mine = model.high("abs_max", row, column);
        const other = model.cell("reference.abs_max.high", row, column);
        const bits = mine === other ? 0 : Math.log2(mine / other) / MOST_RATIO;
        score = clamp(bits, -1);
      } else {
        const bits = Math.log2(model.cell("excess", row, column));
        score = clamp((bits + MOST_DIFFERENCE) / (2 * MOST_DIFFERENCE), 0);
      }
      made[row * columns + column] = model.isBad(row, column) ? NOT_FINITE : score;
    }
  }
  return made;
}

function describe(model: Model, row: number, column: number): string {
  const head = `${model.name(row)}, ${stepsOf(model, column)}`;
  if (!model.wasSeen(row, column)) return `${head}: not compared`;
  const excess = model.cell("excess", row, column);
  const mine = formatNumber(model.high("abs_max", row, column));
  const other = formatNumber(model.cell("reference.abs_max.high", row, column));
  const apart = excess === 0 ? "equal to the bit" : `error ${formatTimes(excess)} times its limit`;
  const bad = model.isBad(row, column) ? ", not finite on one side" : "";
  return `${head}: ${apart}, abs max ${mine}, reference ${other}${bad}`;
}

/** An error over its limit. */
export function formatTimes(times: number): string {
  if (times > 2 ** 40) return "far more";
  return formatNumber(times);
}

/** A step; the first weights stand before step 0, and what never came has none. */
export function stepText(step: number | null): string {
  if (step === null || Number.isNaN(step) || step < -1) return "–";
  return step < 0 ? "start" : formatCount(step);
}
