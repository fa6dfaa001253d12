// Of a run with several ranks: ranks by steps, each cell that of the site which is farthest off.
import { stepsOf } from "./cells";
import type { Mode } from "./colours";
import { formatBits, formatNumber } from "./format";
import { matrixSection } from "./heatmap";
import { type Lines, Matrix } from "./matrix";
import { type Model, range } from "./model";
import { MOST_BITS, MOST_RATIO, NOT_FINITE } from "./scores";
import type { Store } from "./store";

/** Cells of ranks by steps: the row of the model that each one is about, -1 without one. */
interface Worst {
  /** Powers of two from the median of the ranks. */
  bits: Float32Array;
  farthest: Int32Array;
  headroom: Float32Array;
  narrowest: Int32Array;
}

export function rankMap(store: Store): HTMLElement | null {
  const { model } = store;
  if (!model.hasSeveralRanks) return null;
  const { axis, first } = model.header;
  const columns = axis.starts.length;
  const lineOf = new Map(model.ranks.map((rank, line) => [rank, line]));
  const worst = findWorst(model, lineOf);
  const rowAt = (line: number, column: number): number => {
    const isFarthest = matrix.mode === "ranks";
    return (isFarthest ? worst.farthest : worst.narrowest)[line * columns + column]!;
  };
  const lines: Lines = {
    id: "rank-map",
    label: "Heat map of ranks by steps",
    starts: axis.starts,
    rows: () => range(model.ranks.length),
    scores: (mode) => scores(worst, mode),
    name: (line, room) => nameOf(model, line, room),
    describe: (line, column) => describe(model, worst, line, column, rowAt(line, column)),
    choose: (line, column) => {
      const row = rowAt(line, column);
      store.setFilter({ rank: String(model.ranks[line]) });
      if (row >= 0) store.open(row, axis.starts[column] ?? 0);
    },
    chosen: () => {
      const line = store.chosen && lineOf.get(model.rank(store.chosen.row));
      return line == null ? null : { row: line, column: model.column(store.chosen!.step) };
    },
    first: first && model.column(first.step),
  };
  const matrix: Matrix = new Matrix(lines, "ranks");
  store.onChosen(() => matrix.draw());
  return matrixSection(store, "rank-map", "Ranks by steps", matrix, {
    modes: [
      ["ranks", "farthest from the median of the ranks"],
      ["headroom", "least headroom"],
    ],
    hint:
      "A cell shows the rank's site that is farthest off in these steps, by abs max. Click a cell, or " +
      "move with the arrow keys and press Enter, to show this site.",
    isWatched: false,
    filter: null,
  });
}

function findWorst(model: Model, lineOf: Map<number, number>): Worst {
  const columns = model.header.axis.starts.length;
  const cells = model.ranks.length * columns;
  const made: Worst = {
    bits: new Float32Array(cells).fill(Number.NaN),
    farthest: new Int32Array(cells).fill(-1),
    headroom: new Float32Array(cells).fill(Number.NaN),
    narrowest: new Int32Array(cells).fill(-1),
  };
  const bySite = new Map<number, number[]>();
  for (const row of range(model.rowCount)) {
    const mine = bySite.get(model.site(row));
    if (mine) mine.push(row);
    else bySite.set(model.site(row), [row]);
  }
  for (const rows of bySite.values()) {
    const limit = model.limitBits(rows[0]!);
    for (let column = 0; column < columns; column++) {
      const logs = rows.map((row) => Math.log2(model.high("abs_max", row, column)));
      const middle = median(logs);
      rows.forEach((row, at) => {
        if (!model.wasSeen(row, column)) return;
        const cell = lineOf.get(model.rank(row))! * columns + column;
        const isBad = model.isBad(row, column);
        // All zeros are far off, but not as far as what is not finite.
        const apart = rows.length > 1 ? Math.max(logs[at]! - middle, -1000) : Number.NaN;
        const bits = isBad ? Infinity : apart;
        const room = isBad ? -Infinity : limit - logs[at]!;
        if (made.farthest[cell]! < 0 || Math.abs(bits) > Math.abs(made.bits[cell]!)) {
          made.bits[cell] = Number.isNaN(bits) ? 0 : bits;
          made.farthest[cell] = row;
        }
        if (made.narrowest[cell]! < 0 || room < made.headroom[cell]!) {
          made.headroom[cell] = Number.isNaN(room) ? Infinity : room;
          made.narrowest[cell] = row;
        }
      });
    }
  }
  return made;
}

function scores(worst: Worst, mode: Mode): Float32Array {
  const isRanks = mode === "ranks";
  return (isRanks ? worst.bits : worst.headroom).map((bits) => {
    if (bits === (isRanks ? Infinity : -Infinity)) return NOT_FINITE;
    if (isRanks) return Math.max(-1, Math.min(bits / MOST_RATIO, 1));
    return Math.max(0, Math.min(1 - bits / MOST_BITS, 1));
  });
}

function median(values: number[]): number {
  const finite = values.filter(Number.isFinite).sort((one, other) => one - other);
  const middle = finite.length >> 1;
  if (finite.length % 2) return finite[middle]!;
  return finite.length ? (finite[middle - 1]! + finite[middle]!) / 2 : Number.NaN;
}

function nameOf(model: Model, line: number, room: number): string {
  const rank = model.ranks[line]!;
  const host = model.header.meta[rank]?.host;
  const name = host == null ? `rank ${rank}` : `rank ${rank} · ${host}`;
  return name.length <= room ? name : `rank ${rank}`;
}

function describe(model: Model, worst: Worst, line: number, column: number, row: number): string {
  const cell = line * model.header.axis.starts.length + column;
  const head = `rank ${model.ranks[line]}, ${stepsOf(model, column)}`;
  if (row < 0) return `${head}: no record`;
  const value = `abs max ${formatNumber(model.high("abs_max", row, column))}`;
  const bits = worst.bits[cell]!;
  const parts = [
    `${head}: ${model.name(row)}, ${model.isBad(row, column) ? "not finite" : value}`,
    ...(worst.farthest[cell] === row && Number.isFinite(bits)
      ? [`${formatNumber(2 ** bits)} times the median of the ranks`]
      : []),
    ...(worst.narrowest[cell] === row && Number.isFinite(worst.headroom[cell]!)
      ? [`headroom ${formatBits(worst.headroom[cell]!)}`]
      : []),
  ];
  return parts.join(", ");
}
