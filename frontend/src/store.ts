// What the parts of the page share: which sites are shown, and which cell is chosen.
import type { Model } from "./model";
import { range } from "./model";

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
  chosen: { row: number; step: number } | null = null;
  readonly #filterListeners: Listener[] = [];
  readonly #chosenListeners: Listener[] = [];
  readonly #themeListeners: Listener[] = [];

  constructor(model: Model) {
    this.model = model;
    const rank = model.header.first?.rank ?? model.ranks[0] ?? 0;
    this.filter = { text: "", module: "", role: "", verdict: "", rank: "" };
    if (model.hasSeveralRanks) this.filter.rank = String(rank);
    this.rows = this.#matching();
  }

  setFilter(changed: Partial<Filter>): void {
    this.filter = { ...this.filter, ...changed };
    this.rows = this.#matching();
    for (const listener of this.#filterListeners) listener();
  }

  choose(row: number, step: number): void {
    this.chosen = { row, step };
    for (const listener of this.#chosenListeners) listener();
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

  #matching(): number[] {
    const { model, filter } = this;
    const words = filter.text.toLowerCase().split(/\s+/).filter(Boolean);
    return range(model.rowCount).filter((row) => {
      if (filter.rank && String(model.rank(row)) !== filter.rank) return false;
      if (
        filter.role &&
        `${model.text("direction", row)} ${model.text("role", row)}` !== filter.role
      )
        return false;
      if (filter.verdict && model.verdicts[row] !== filter.verdict) return false;
      if (filter.module && groupOf(model.module(row)) !== filter.module) return false;
      const name = words.length ? model.name(row).toLowerCase() : "";
      return words.every((word) => name.includes(word));
    });
  }
}

/** The part of a module's path that the choice of modules shows: up to the first number in it. */
export function groupOf(module: string): string {
  const parts = module.split(".");
  const number = parts.findIndex((part) => /^\d+$/.test(part));
  return parts.slice(0, number < 0 ? 1 : number + 1).join(".");
}
