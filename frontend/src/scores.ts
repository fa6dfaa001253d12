// What the heat map's colours show, as a number for each cell.
import type { Mode } from "./colours";
import type { Model } from "./model";

/** Bits of headroom above which the colour no longer changes. */
export const MOST_BITS = 16;
/** Robust standard deviations beyond which it no longer changes. */
export const MOST_DEVIATIONS = 8;
/** Powers of two, up and down, beyond which a difference over its limit no longer changes colour. */
export const MOST_DIFFERENCE = 10;
/** The same of the abs max of one side over that of the other. */
export const MOST_RATIO = 4;
/** Robust standard deviations from the peers of a fleet beyond which the colour no longer changes. */
export const MOST_OUTLYING = 100;
/** A score beyond all others: not finite. */
export const NOT_FINITE = 2;
/** A score beyond all finite ones: bits that replicas do not have. */
export const DIFFERS = 1.5;

/**
 * A score for each cell: 0 to 1, for "unusual" -1 to 1; NaN without a value, NOT_FINITE where one was
 * not. The larger its distance from 0, the more of a cell's neighbours it stands for.
 */
export function scores(model: Model, mode: Mode): Float32Array {
  const columns = model.header.axis.starts.length;
  const made = new Float32Array(model.rowCount * columns);
  const logs = new Float64Array(columns);
  const [low, high] = mode === "magnitude" ? extremes(model) : [0, 0];
  for (let row = 0; row < model.rowCount; row++) {
    for (let column = 0; column < columns; column++) {
      logs[column] = Math.log2(model.high("abs_max", row, column));
    }
    const limit = model.limitBits(row);
    const [middle, spread] = mode === "unusual" ? robust(logs) : [0, 1];
    for (let column = 0; column < columns; column++) {
      const bits = logs[column]!;
      let score: number;
      if (mode === "headroom") score = clamp(1 - (limit - bits) / MOST_BITS, 0, 1);
      else if (mode === "magnitude") score = clamp((bits - low) / Math.max(high - low, 1), 0, 1);
      else score = clamp((bits - middle) / spread / MOST_DEVIATIONS, -1, 1);
      made[row * columns + column] = model.isBad(row, column) ? NOT_FINITE : score;
    }
  }
  return made;
}

/** Median of the finite values, and 1.4826 times the median distance from it, 0.05 octaves at least. */
export function robust(values: Float64Array): [number, number] {
  const finite = values.filter(Number.isFinite).sort();
  if (!finite.length) return [Number.NaN, 1];
  const middle = finite[finite.length >> 1]!;
  const distances = finite.map((value) => Math.abs(value - middle)).sort();
  return [middle, Math.max(1.4826 * distances[distances.length >> 1]!, 0.05)];
}

function extremes(model: Model): [number, number] {
  let low = Number.POSITIVE_INFINITY;
  let high = Number.NEGATIVE_INFINITY;
  for (let row = 0; row < model.rowCount; row++) {
    const bits = Math.log2(model.number("peak", row));
    if (!Number.isFinite(bits)) continue;
    low = Math.min(low, bits - 12);
    high = Math.max(high, bits);
  }
  return low < high ? [low, high] : [0, 1];
}

function clamp(value: number, low: number, high: number): number {
  return Math.max(low, Math.min(value, high));
}
