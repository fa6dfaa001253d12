// The table of sites: sorted by any column, filtered by the form above it.
import { h, scrolling, section } from "./dom";
import { filterForm } from "./filters";
import { formatCount, formatNumber, formatShare } from "./format";
import type { Model } from "./model";
import type { Store } from "./store";

export interface Column {
  title: string;
  isNumber: boolean;
  key(model: Model, row: number): number | string;
  text(model: Model, row: number): string;
}

const PAGE = 50;

export function number(title: string, field: string, format: (value: number) => string): Column {
  return {
    title,
    isNumber: true,
    key: (model, row) => model.number(field, row),
    text: (model, row) => {
      const value = model.number(field, row);
      return value < 0 ? "–" : format(value);
    },
  };
}

const COLUMNS: Column[] = [
  {
    title: "site",
    isNumber: false,
    key: (_, row) => row,
    text: (model, row) => model.name(row),
  },
  {
    title: "dtype",
    isNumber: false,
    key: (model, row) => model.dtype(row),
    text: (model, row) => model.dtype(row),
  },
  number("records", "records", formatCount),
  number("last abs max", "last_abs_max", formatNumber),
  number("largest abs max", "peak", formatNumber),
  number("at step", "peak_step", formatCount),
  {
    title: "least headroom, bits",
    isNumber: true,
    key: (model, row) => model.headroom(row),
    text: (model, row) => {
      const bits = model.headroom(row);
      return Number.isNaN(bits) ? "–" : bits.toFixed(1);
    },
  },
  number("zeros", "zero_share", formatShare),
  number("not finite", "bad_records", formatCount),
  number("first not finite", "first_bad_step", formatCount),
  {
    title: "verdict",
    isNumber: false,
    key: (model, row) => model.verdicts[row] ?? "",
    text: (model, row) => model.verdicts[row] ?? "",
  },
];

/** What the table shows, and where a click on a row leads. */
export interface SiteColumns {
  title: string;
  caption: string;
  columns: Column[];
  stepOf(model: Model, row: number): number;
  isOrdinary(verdict: string): boolean;
}

const RUN: SiteColumns = {
  title: "Sites",
  caption: "Every tensor that was read. Click a name to show it.",
  columns: COLUMNS,
  stepOf: (model, row) => {
    const bad = model.number("first_bad_step", row);
    return bad >= 0 ? bad : model.number("last_step", row);
  },
  isOrdinary: (verdict) => verdict === "finite",
};

export function sites(store: Store, shown: SiteColumns = RUN): HTMLElement {
  return new SiteTable(store, shown).element;
}

class SiteTable {
  readonly element: HTMLElement;
  readonly #store: Store;
  readonly #given: SiteColumns;
  readonly #body = h("tbody");
  readonly #heads: HTMLTableCellElement[];
  readonly #more: HTMLButtonElement;
  #sorted: { column: number; sign: 1 | -1 } = { column: 0, sign: 1 };
  #shown = PAGE;

  constructor(store: Store, given: SiteColumns) {
    this.#store = store;
    this.#given = given;
    this.#heads = given.columns.map((column, at) =>
      h(
        "th",
        { scope: "col", class: column.isNumber ? "number" : "" },
        h("button", { type: "button", onClick: () => this.#sort(at) }, column.title),
      ),
    );
    this.#more = h("button", {
      type: "button",
      class: "more",
      onClick: () => {
        this.#shown += PAGE;
        this.#draw();
      },
    });
    const caption = h("caption", {}, h("span", {}, given.caption));
    const table = h(
      "table",
      { id: "site-table" },
      caption,
      h("thead", {}, h("tr", {}, ...this.#heads)),
      this.#body,
    );
    const scroller = scrolling("Table of sites", table);
    this.element = section("sites", given.title, filterForm(store, "sites"), scroller, this.#more);
    store.onFilter(() => {
      this.#shown = PAGE;
      this.#draw();
    });
    this.#draw();
  }

  #sort(column: number): void {
    const isSame = this.#sorted.column === column;
    const first = this.#given.columns[column]!.isNumber ? -1 : 1;
    this.#sorted = { column, sign: isSame ? (-this.#sorted.sign as 1 | -1) : first };
    this.#draw();
  }

  #draw(): void {
    const { model, rows } = this.#store;
    const { column, sign } = this.#sorted;
    const keys = new Map(rows.map((row) => [row, this.#given.columns[column]!.key(model, row)]));
    const ordered = [...rows].sort((one, other) => compare(keys.get(one)!, keys.get(other)!, sign));
    this.#heads.forEach((head, at) => {
      if (at === column) head.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
      else head.removeAttribute("aria-sort");
    });
    this.#body.replaceChildren(...ordered.slice(0, this.#shown).map((row) => this.#row(row)));
    const left = rows.length - this.#shown;
    this.#more.hidden = left <= 0;
    this.#more.textContent = `Show ${left > PAGE ? `${PAGE} of ${formatCount(left)}` : left} more`;
  }

  #row(row: number): HTMLTableRowElement {
    const { model } = this.#store;
    const verdict = model.verdicts[row] ?? "";
    const cells = this.#given.columns
      .slice(1)
      .map((column) =>
        h("td", { class: column.isNumber ? "number" : "" }, column.text(model, row)),
      );
    const open = h(
      "button",
      { type: "button", class: "link", onClick: () => this.#open(row) },
      model.name(row),
    );
    const name = h("th", { scope: "row" }, open);
    return h("tr", { class: this.#given.isOrdinary(verdict) ? "" : "bad-row" }, name, ...cells);
  }

  #open(row: number): void {
    const { model } = this.#store;
    this.#store.open(row, this.#given.stepOf(model, row));
  }
}

/** What has no value comes last. */
function compare(one: number | string, other: number | string, sign: number): number {
  if (typeof one === "string" || typeof other === "string") {
    return sign * String(one).localeCompare(String(other));
  }
  if (Number.isNaN(one) || Number.isNaN(other))
    return Number(Number.isNaN(one)) - Number(Number.isNaN(other));
  return sign * (one - other);
}
