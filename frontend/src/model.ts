// The data of the page, typed, and what is derived from it.
import { bitOf, type Opened, type Plane } from "./container";
import { tailOf, tailOfPath } from "./format";
import type { Watched } from "./watched";

export type Statistic = "abs_max" | "rms" | "mean" | "zero_share";
export const STATISTICS: readonly Statistic[] = ["abs_max", "rms", "mean", "zero_share"];

export interface Axis {
  width: number;
  starts: number[];
}

/** Numbers of one rank's steps; "nan", "inf" and "-inf" are text. */
export interface StepColumns {
  step: number[];
  count: number;
  loss: Cell[];
  scale: Cell[];
  learning_rate: Cell[];
  gradient_norm: Cell[];
  overflow: number[];
}
export type Cell = number | string | null;

export interface PageEvent {
  step: number;
  rank: number;
  row: number;
  where: string;
  verdict: number;
  counted: boolean;
  reason: string;
  line: string;
  counts: [number, number, number];
}

export interface Place {
  row: number;
  seq: number;
  call: number;
  verdict: number;
  counts: [number, number, number];
  /** The numbers of the places that its operator read. */
  read: number[];
  /** The number of the place that the verdict derives it from. */
  follows: number[];
}

/** What a comparison has beside the data of a run; the run's own are those of actual. */
export interface ComparisonHeader {
  kind: string;
  actual: string;
  reference: string;
  verdict: string;
  is_timed: boolean;
  questions: Record<string, string>;
  reasons: string[];
  reference_steps: Record<string, StepColumns>;
  parted: Parted[];
  pairs: Pair[];
  pair_count: number;
}

/** Where one signal of both sides parts; null: nowhere. */
export interface Parted {
  signal: string;
  first_inexact: number | null;
  first_different: number | null;
  actual: Cell;
  reference: Cell;
  row: number;
}

export interface Pair {
  step: number;
  question: string;
  name: string;
  call: number;
  state: string;
  error: Cell;
  reason: string;
  cosine: Cell;
  max_abs: Cell;
  max_ulp: Cell;
  actual: Side | null;
  reference: Side | null;
}

interface Side {
  dtype: string | null;
  shape: number[] | null;
  numel: number | null;
  min: Cell;
  max: Cell;
  mean: Cell;
}

interface Header {
  comparison?: ComparisonHeader;
  fastcheck: string;
  directory: string;
  records: number;
  damaged: number;
  dropped_bytes: number;
  dtypes: { name: string; max: string | null }[];
  verdicts: string[];
  sites: Record<"module" | "type" | "direction" | "role" | "name" | "op", string[]>;
  rows: Record<string, Cell[]>;
  bad: number[][];
  steps: Record<string, StepColumns>;
  events: PageEvent[];
  event_count: number;
  watched?: Watched[];
  watch_count: number;
  first: { rank: number; step: number; row: number } | null;
  /** The cell that is chosen when the page opens; of a comparison it is `first`. */
  opens?: { rank: number; step: number; row: number } | null;
  spread: { count: number; places: Place[] };
  meta: Record<string, Record<string, unknown>>;
  axis: Axis;
  coarse: Axis;
  exact: boolean;
  around: { rows: number[]; steps: number[] } | null;
}

export const BAD = { nan: 1, posinf: 2, neginf: 4, saturated: 8, event: 16 } as const;
const NONFINITE = BAD.nan | BAD.posinf | BAD.neginf | BAD.saturated;

export class Model {
  readonly header: Header;
  readonly ranks: number[];
  readonly rowCount: number;
  readonly verdicts: string[];
  /** What the paths of most modules begin with, and narrow places leave out: `transformer.`. */
  readonly prefix: string;
  readonly #planes: Map<string, Plane>;
  readonly #bad = new Map<number, number[]>();

  constructor({ header, planes }: Opened) {
    this.header = header as Header;
    this.#planes = planes;
    this.ranks = Object.keys(this.header.meta).map(Number);
    this.rowCount = this.header.rows.site!.length;
    const [rows = []] = this.header.bad;
    rows.forEach((row, index) => {
      const mine = this.#bad.get(row);
      if (mine) mine.push(index);
      else this.#bad.set(row, [index]);
    });
    this.verdicts = this.#verdicts();
    this.prefix = commonPrefix(this.header.sites.module);
  }

  get hasSeveralRanks(): boolean {
    return this.ranks.length > 1;
  }

  axisOf(statistic: Statistic): Axis {
    return statistic === "abs_max" ? this.header.axis : this.header.coarse;
  }

  /** The largest and the smallest value of a bucket; NaN without one. */
  high(statistic: Statistic, row: number, column: number): number {
    return this.#planes.get(`${statistic}.high`)?.at(row, column) ?? Number.NaN;
  }

  low(statistic: Statistic, row: number, column: number): number {
    const plane = this.#planes.get(`${statistic}.low`) ?? this.#planes.get(`${statistic}.high`);
    return plane?.at(row, column) ?? Number.NaN;
  }

  /** A cell of any plane; NaN without one. */
  cell(plane: string, row: number, column: number): number {
    return this.#planes.get(plane)?.at(row, column) ?? Number.NaN;
  }

  has(plane: string): boolean {
    return this.#planes.has(plane);
  }

  isThinned(statistic: Statistic): boolean {
    return this.#planes.has(`${statistic}.low`);
  }

  bad(row: number, column: number): number {
    return this.#planes.get("bad")?.at(row, column) ?? 0;
  }

  isBad(row: number, column: number): boolean {
    return (this.bad(row, column) & NONFINITE) !== 0;
  }

  wasSeen(row: number, column: number): boolean {
    const plane = this.#planes.get("seen");
    return plane !== undefined && bitOf(plane, row * this.header.axis.starts.length + column);
  }

  /** A number of the table of sites; NaN without one. */
  number(column: string, row: number): number {
    return toNumber(this.header.rows[column]?.[row] ?? null);
  }

  site(row: number): number {
    return this.number("site", row);
  }

  rank(row: number): number {
    return this.number("rank", row);
  }

  text(field: keyof Header["sites"], row: number): string {
    return this.header.sites[field][this.site(row)] ?? "";
  }

  module(row: number): string {
    return this.text("module", row) || this.text("type", row);
  }

  /** The tensor's name in full. */
  name(row: number): string {
    const op = this.text("op", row);
    const rank = this.hasSeveralRanks ? `, rank ${this.rank(row)}` : "";
    const parts = [this.module(row), op, this.text("direction", row)].filter(Boolean);
    return `${parts.join(" · ")} · ${this.text("name", row)}${rank}`;
  }

  /** Which way the tensor went: nothing for forward. */
  arrow(row: number): string {
    return { backward: "← ", optimizer: "↻ " }[this.text("direction", row)] ?? "";
  }

  /** A name for a narrow place: of a long one the end of the module's path, but all of the role. */
  shortName(row: number, room: number): string {
    const module = this.module(row);
    const op = this.text("op", row).replace(/^aten\./, "");
    const name = this.text("name", row);
    let isGradient = name.startsWith("gradient of ");
    let tail = name.replace(/^(gradient of|parameter|buffer|optimizer state) /, "");
    if (tail.startsWith(`${module}.`)) tail = tail.slice(module.length + 1);
    tail = tail.replace(/^(grad_)?(output|input)/, (_, grad, side) => {
      isGradient ||= grad !== undefined;
      return side === "output" ? "out" : "in";
    });
    const role = `${this.arrow(row)}${op && `${op} `}${tail}${isGradient ? ".grad" : ""}`;
    const path = module.startsWith(this.prefix) ? module.slice(this.prefix.length) : module;
    const left = room - role.length - 1;
    return path && left > 2 ? `${tailOfPath(path, left)} ${role}` : tailOf(role, room);
  }

  dtype(row: number): string {
    return this.header.dtypes[this.number("dtype", row)]?.name ?? "";
  }

  /** log2 of the largest number of the dtype; NaN for integers. */
  limitBits(row: number): number {
    const max = this.header.dtypes[this.number("dtype", row)]?.max;
    return max == null ? Number.NaN : Math.log2(Number(max));
  }

  /** Of the largest value that was read, bits to the largest number of the dtype. */
  headroom(row: number): number {
    const peak = this.number("peak", row);
    return peak > 0 ? this.limitBits(row) - Math.log2(peak) : Number.NaN;
  }

  column(step: number, axis: Axis = this.header.axis): number {
    let low = 0;
    let high = axis.starts.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (axis.starts[middle]! <= step) low = middle;
      else high = middle - 1;
    }
    return low;
  }

  /** NaN, +Inf and -Inf counts of a row in the steps of a bucket, as far as the page has them. */
  counts(row: number, from: number, width: number): [number, number, number] {
    const [, steps = [], nan = [], posinf = [], neginf = []] = this.header.bad;
    const found: [number, number, number] = [0, 0, 0];
    for (const index of this.#bad.get(row) ?? []) {
      const step = steps[index]!;
      if (step < from || step >= from + width) continue;
      found[0] += nan[index]!;
      found[1] += posinf[index]!;
      found[2] += neginf[index]!;
    }
    return found;
  }

  /** An exact value near the first event; undefined where the page has none. */
  around(statistic: Statistic, row: number, step: number): number | undefined {
    const around = this.header.around;
    const at = around?.rows.indexOf(row) ?? -1;
    const column = around?.steps.indexOf(step) ?? -1;
    if (at < 0 || column < 0) return undefined;
    return this.#planes.get(`around.${statistic}`)?.at(at, column);
  }

  rowsOfSite(site: number): number[] {
    return range(this.rowCount).filter((row) => this.site(row) === site);
  }

  #verdicts(): string[] {
    if (this.header.comparison) return range(this.rowCount).map((row) => this.#state(row));
    const found: string[] = range(this.rowCount).map((row) =>
      this.number("bad_records", row) > 0 ? "non-finite" : "finite",
    );
    const name = (verdict: number): string => this.header.verdicts[verdict] ?? "";
    for (const place of this.header.spread.places) {
      if (place.row >= 0 && place.verdict) found[place.row] = name(place.verdict);
    }
    for (const event of [...this.header.events].reverse()) {
      if (event.row >= 0) found[event.row] = name(event.verdict);
    }
    return found;
  }

  #state(row: number): string {
    if (this.number("bad_records", row) > 0) return "not finite on one side";
    if (this.number("different", row) > 0) return "different";
    return this.number("worst", row) > 0 ? "within the limits" : "equal to the bit";
  }
}

/** The beginning of most paths, up to a dot, without which they are as distinct as with it. */
function commonPrefix(paths: string[]): string {
  const modules = [...new Set(paths)].filter((path) => path.includes("."));
  let prefix = "";
  for (;;) {
    const counts = new Map<string, number>();
    for (const path of modules.filter((one) => one.startsWith(prefix))) {
      const [head = "", ...rest] = path.slice(prefix.length).split(".");
      // A number alone would stand for nothing.
      if (rest.length && !/^\d+$/.test(rest[0]!)) counts.set(head, (counts.get(head) ?? 0) + 1);
    }
    const [most, count] = [...counts].sort(([, one], [, other]) => other - one)[0] ?? ["", 0];
    const longer = `${prefix}${most}.`;
    const others = new Set(paths.filter((path) => !path.startsWith(longer)));
    const isClear = paths.every(
      (path) => others.has(path) || !others.has(path.slice(longer.length)),
    );
    if (!count || count * 3 < modules.length * 2 || !isClear) return prefix;
    prefix = longer;
  }
}

export function toNumber(cell: Cell): number {
  if (typeof cell === "number") return cell;
  if (cell === "inf") return Number.POSITIVE_INFINITY;
  return cell === "-inf" ? Number.NEGATIVE_INFINITY : Number.NaN;
}

export function range(count: number): number[] {
  return Array.from({ length: count }, (_, index) => index);
}
