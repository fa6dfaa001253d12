// What the parts of the page share: which sites are shown, and which cell is chosen.
import type { Model } from "./model";
import { range } from "./model";
import { matcher } from "./format";

export interface Filter {
  text: string;
  module: string;
  role: string;
  verdict: string;
  rank: string;
}

type Listener = () => void;

export class Store {
  readonly model: Model;
  filter: Filter;
  /** The rows that the filter leaves, in the order of the device. */
  rows: number[] = [];
  /** Those of them that the heat map shows. */
  mapRows: number[] = [];
  isFolded = true;
  /** How many rows it can fold: those of the optimizer's turns that hold nothing unusual. */
  foldedRows = 0;
  chosen: { row: number; step: number } | null = null;
  readonly #unusual: ReadonlySet<number>;
  readonly #filterListeners: Listener[] = [];
  readonly #chosenListeners: Listener[] = [];
  readonly #themeListeners: Listener[] = [];

  constructor(model: Model) {
    this.model = model;
    const { first, opens = first, watched, events } = model.header;
    const rank = opens?.rank ?? model.ranks[0] ?? 0;
    this.#unusual = new Set([
      ...(opens ? [opens.row] : []),
      ...(watched ?? []).flatMap((event) => [event.row, event.mover?.row ?? -1]),
      ...events.map((event) => event.row),
    ]);
    this.filter = { text: "", module: "", role: "", verdict: "", rank: "" };
    if (model.hasSeveralRanks) this.filter.rank = String(rank);
    this.#match();
  }

  setFilter(changed: Partial<Filter>): void {
    this.filter = { ...this.filter, ...changed };
    this.#match();
    for (const listener of this.#filterListeners) listener();
  }

  toggleFold(): void {
    this.isFolded = !this.isFolded;
    this.setFilter({});
  }

  choose(row: number, step: number): void {
    this.chosen = { row, step };
    for (const listener of this.#chosenListeners) listener();
  }

  /** Chooses a cell and shows its curves. */
  open(row: number, step: number): void {
    this.choose(row, step);
    document.getElementById("site")?.scrollIntoView({ block: "start" });
  }

  themeChanged(): void {
    for (const listener of this.#themeListeners) listener();
  }

  onFilter(listener: Listener): void {
    this.#filterListeners.push(listener);
  }

  onChosen(listener: Listener): void {
    this.#chosenListeners.push(listener);
  }

  onTheme(listener: Listener): void {
    this.#themeListeners.push(listener);
  }

  #match(): void {
    this.rows = this.#matching();
    const { model } = this;
    const isTurn = (row: number): boolean => model.text("direction", row) === "optimizer";
    const others = this.rows.filter(
      (row) =>
        !isTurn(row) ||
        this.#unusual.has(row) ||
        model.number("bad_records", row) > 0 ||
        model.number("different", row) > 0,
    );
    // Where there is nothing else, they are what is looked for.
    this.foldedRows = this.rows.every(isTurn) ? 0 : this.rows.length - others.length;
    this.mapRows = this.foldedRows && this.isFolded ? others : this.rows;
  }

  #matching(): number[] {
    const { model, filter } = this;
    const matches = matcher(filter.text);
    return range(model.rowCount).filter((row) => {
      if (filter.rank && String(model.rank(row)) !== filter.rank) return false;
      if (
        filter.role &&
        `${model.text("direction", row)} ${model.text("role", row)}` !== filter.role
      )
        return false;
      if (filter.verdict && model.verdicts[row] !== filter.verdict) return false;
      if (filter.module && groupOf(model.module(row)) !== filter.module) return false;
      return matches(model.name(row));
    });
  }
}

/** The part of a module's path that the choice of modules shows: up to the first number in it. */
export function groupOf(module: string): string {
  const parts = module.split(".");
  const number = parts.findIndex((part) => /^\d+$/.test(part));
  return parts.slice(0, number < 0 ? 1 : number + 1).join(".");
}
