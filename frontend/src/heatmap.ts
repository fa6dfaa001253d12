// The heat map: a row for each site, a column for each bucket of steps.
import type { Cells } from "./cells";
import type { Mode } from "./colours";
import { h, section, select } from "./dom";
import { filterForm } from "./filters";
import { tailOf } from "./format";
import { legend } from "./legend";
import { drawWatched } from "./marks";
import { type Lines, Matrix } from "./matrix";
import type { Store } from "./store";

export function heatmap(store: Store, cells: Cells): HTMLElement {
  const { model } = store;
  const { first, axis, watched } = model.header;
  const lines: Lines = {
    id: "heatmap",
    label: "Heat map of sites by steps",
    starts: axis.starts,
    rows: () => store.rows,
    scores: cells.scores,
    // Of a long name the end of the module's path.
    name: (row, room) =>
      tailOf(room < 26 ? model.arrow(row) + model.module(row) : model.shortName(row), room),
    describe: cells.describe,
    choose: (row, column) => store.choose(row, axis.starts[column] ?? 0),
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
  });
}

/** A matrix with what chooses its colours and its height, a legend and its keys. */
export function matrixSection(
  theme: { onTheme(listener: () => void): void },
  id: string,
  title: string,
  matrix: Matrix,
  parts: { modes: [Mode, string][]; hint: string; isWatched: boolean; filter: HTMLElement | null },
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
    matrix.element,
    matrix.status,
    h("p", { id: `${id}-keys`, class: "hint" }, parts.hint),
  );
}
