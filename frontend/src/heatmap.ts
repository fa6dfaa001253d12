// The heat map: a row for each site, a column for each bucket of steps.
import type { Cells } from "./cells";
import type { Mode } from "./colours";
import { h, section, select } from "./dom";
import { filterForm } from "./filters";
import { formatCount } from "./format";
import { legend } from "./legend";
import { drawWatched } from "./marks";
import { type Lines, Matrix } from "./matrix";
import { range } from "./model";
import type { Store } from "./store";

export function heatmap(store: Store, cells: Cells): HTMLElement {
  const { model } = store;
  const { first, axis, watched } = model.header;
  const fold = foldButton(store);
  const lines: Lines = {
    id: "heatmap",
    label: "Heat map of sites by steps",
    starts: axis.starts,
    rows: () => store.mapRows,
    scores: cells.scores,
    name: (row, room) => model.shortName(row, room),
    describe: cells.describe,
    choose: (row, column) => store.open(row, axis.starts[column] ?? 0),
    chosen: () =>
      store.chosen && { row: store.chosen.row, column: model.column(store.chosen.step) },
    first: first && model.column(first.step),
    drawOver: (context, area) => drawWatched(context, store, area),
  };
  const matrix = new Matrix(lines, cells.firstMode);
  store.onFilter(() => matrix.rowsChanged());
  store.onChosen(() => matrix.draw());
  return matrixSection(store, "heatmap", cells.title, matrix, {
    modes: cells.modes,
    hint: cells.hint,
    isWatched: Boolean(watched?.length),
    filter: filterForm(store, "heatmap"),
    notes: names(store),
    below: fold,
  });
}

/** What the names of the rows leave out, and what their arrows are. */
function names(store: Store): HTMLElement | null {
  const { prefix, rowCount } = store.model;
  const arrows = new Set(range(rowCount).map((row) => store.model.arrow(row)));
  const parts = [
    ...(arrows.has("← ") ? ["← backward pass"] : []),
    ...(arrows.has("↻ ") ? ["↻ optimizer's step"] : []),
    ...(prefix ? [`names without ${prefix}`] : []),
  ];
  return parts.length ? h("p", { class: "hint names" }, parts.join(" · ")) : null;
}

/** Folds and unfolds the rows of the optimizer's step. */
function foldButton(store: Store): HTMLElement {
  const button = h("button", { type: "button", class: "more", onClick: () => store.toggleFold() });
  const show = (): void => {
    const folded = store.foldedRows;
    const rows = `${formatCount(folded)} row${folded === 1 ? "" : "s"} of the optimizer's step`;
    button.textContent = store.isFolded ? `Show ${rows}` : `Hide ${rows}`;
    button.hidden = !folded;
  };
  store.onFilter(show);
  show();
  return button;
}

/** A matrix with what chooses its colours and its height, a legend and its keys. */
export function matrixSection(
  theme: { onTheme(listener: () => void): void },
  id: string,
  title: string,
  matrix: Matrix,
  parts: {
    modes: [Mode, string][];
    hint: string;
    isWatched: boolean;
    filter: HTMLElement | null;
    notes?: HTMLElement | null;
    below?: HTMLElement;
  },
): HTMLElement {
  const colours = h("div", { class: "legend" });
  const show = (mode: Mode): void => {
    matrix.setMode(mode);
    colours.replaceChildren(...legend(mode, matrix.palette, parts.isWatched));
  };
  const modes = select("Colour", parts.modes, matrix.mode, (value) => show(value as Mode));
  const heights = select(
    "Rows",
    [
      ["fit", "all at once"],
      ["readable", "readable names"],
    ],
    "fit",
    (value) => {
      matrix.isFit = value === "fit";
    },
  );
  theme.onTheme(() => show(matrix.mode));
  colours.replaceChildren(...legend(matrix.mode, matrix.palette, parts.isWatched));
  return section(
    id,
    title,
    parts.filter,
    h("form", { class: "filters" }, parts.modes.length > 1 ? modes : null, heights),
    colours,
    parts.notes ?? null,
    matrix.element,
    matrix.tip,
    parts.below ?? null,
    matrix.status,
    h("p", { id: `${id}-keys`, class: "hint" }, parts.hint),
  );
}
