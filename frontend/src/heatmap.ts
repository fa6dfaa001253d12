// The heat map: a row for each site, a column for each bucket of steps, on a canvas of its own.
import type { Cells } from "./cells";
import { isDiverging, type Mode, type Palette, palette } from "./colours";
import { h, section, select } from "./dom";
import { filterForm } from "./filters";
import { tailOf } from "./format";
import { legend } from "./legend";
import { drawWatched } from "./marks";
import { NOT_FINITE } from "./scores";
import type { Store } from "./store";

const AXIS = 28;
const TALLEST = 620;
const READABLE = 15;

interface Cursor {
  /** Index into the store's rows. */
  line: number;
  column: number;
}

export function heatmap(store: Store, cells: Cells): HTMLElement {
  return new Heatmap(store, cells).element;
}

class Heatmap {
  readonly element: HTMLElement;
  readonly #store: Store;
  readonly #cells: Cells;
  readonly #canvas = h("canvas");
  readonly #overlay = h("canvas", { class: "overlay" });
  readonly #stage = h("div", { class: "stage" }, this.#canvas, this.#overlay);
  readonly #spacer = h("div", {}, this.#stage);
  readonly #view: HTMLElement;
  readonly #status = h("p", { class: "status", role: "status", "aria-live": "polite" });
  readonly #legend = h("div", { class: "legend" });
  #mode: Mode;
  #isFit = true;
  #scores: Float32Array;
  #palette: Palette;
  #cursor: Cursor | null = null;

  constructor(store: Store, cells: Cells) {
    this.#store = store;
    this.#cells = cells;
    this.#mode = cells.firstMode;
    this.#scores = cells.scores(this.#mode);
    this.#palette = palette(this.#mode);
    const view = h("div", {
      class: "heatmap",
      id: "heatmap-view",
      tabindex: 0,
      role: "application",
      "aria-label": "Heat map of sites by steps",
      "aria-describedby": "heatmap-keys",
    });
    this.#view = view;
    view.append(this.#spacer);
    this.#listen();
    const modes = select("Colour", cells.modes, this.#mode, (value) =>
      this.#setMode(value as Mode),
    );
    const heights = select(
      "Rows",
      [
        ["fit", "all at once"],
        ["readable", "readable names"],
      ],
      "fit",
      (value) => {
        this.#isFit = value === "fit";
        this.draw();
      },
    );
    this.element = section(
      "heatmap",
      cells.title,
      filterForm(store, "heatmap"),
      h("form", { class: "filters" }, modes, heights),
      this.#legend,
      view,
      this.#status,
      h("p", { id: "heatmap-keys", class: "hint" }, cells.hint),
    );
    store.onFilter(() => {
      this.#cursor = null;
      this.draw();
    });
    store.onTheme(() => this.#setMode(this.#mode));
    store.onChosen(() => this.draw());
    new ResizeObserver(() => this.draw()).observe(view);
    window.addEventListener("beforeprint", () => this.draw());
    this.#showLegend();
  }

  get #columns(): number {
    return this.#store.model.header.axis.starts.length;
  }

  get #labels(): number {
    return Math.min(230, Math.max(90, this.#view.clientWidth * 0.26));
  }

  get #lineHeight(): number {
    const lines = Math.max(this.#store.rows.length, 1);
    return this.#isFit ? Math.min(22, TALLEST / lines) : READABLE;
  }

  /** The part of the canvas that shows cells, in CSS pixels. */
  get #area(): { left: number; width: number; height: number } {
    const left = this.#labels;
    const whole = this.#store.rows.length * this.#lineHeight;
    const width = Math.max(this.#view.clientWidth - left - 8, 10);
    return { left, width, height: Math.min(whole, TALLEST) };
  }

  #setMode(mode: Mode): void {
    this.#mode = mode;
    this.#scores = this.#cells.scores(mode);
    this.#palette = palette(mode);
    this.#showLegend();
    this.draw();
  }

  #showLegend(): void {
    const { watched } = this.#store.model.header;
    this.#legend.replaceChildren(...legend(this.#mode, this.#palette, Boolean(watched?.length)));
  }

  draw(): void {
    const { left, width, height } = this.#area;
    if (!this.#view.clientWidth) return;
    const rows = this.#store.rows;
    this.#spacer.style.height = `${rows.length * this.#lineHeight + AXIS}px`;
    this.#view.style.height = `${height + AXIS + 2}px`;
    const context = sized(this.#canvas, this.#view.clientWidth, height + AXIS);
    this.#drawCells(context, left, width, height);
    this.#drawLabels(context, left, height);
    this.#drawAxis(context, left, width, height);
    this.#drawOverlay();
  }

  /** Each pixel shows the cell that is farthest from the ordinary of those that it covers. */
  #drawCells(context: CanvasRenderingContext2D, left: number, width: number, height: number): void {
    const ratio = context.canvas.width / this.#view.clientWidth;
    const wide = Math.max(1, Math.round(width * ratio));
    const tall = Math.max(1, Math.round(height * ratio));
    const image = context.createImageData(wide, tall);
    const { rows } = this.#store;
    const columns = this.#columns;
    const { ramp, bad, none } = this.#palette;
    const bounds = Array.from({ length: wide + 1 }, (_, x) => Math.floor((x * columns) / wide));
    const line = (y: number): number =>
      Math.floor((y / ratio + this.#view.scrollTop) / this.#lineHeight);
    const least = isDiverging(this.#mode) ? -1 : 0;
    for (let y = 0; y < tall; y++) {
      const first = Math.min(line(y), rows.length - 1);
      const last = Math.max(Math.min(line(y + 1), rows.length), first + 1);
      if (y && first === Math.min(line(y - 1), rows.length - 1) && last === first + 1) {
        image.data.copyWithin(y * wide * 4, (y - 1) * wide * 4, y * wide * 4);
        continue;
      }
      for (let x = 0; x < wide; x++) {
        const score = this.#worst(first, last, bounds[x]!, bounds[x + 1]!);
        const index = Math.round(((score - least) / (1 - least)) * 255);
        const colour = Number.isNaN(score) ? none : score === NOT_FINITE ? bad : ramp[index]!;
        const at = (y * wide + x) * 4;
        image.data[at] = colour[0];
        image.data[at + 1] = colour[1];
        image.data[at + 2] = colour[2];
        image.data[at + 3] = 255;
      }
    }
    context.putImageData(image, Math.round(left * ratio), 0);
  }

  #worst(first: number, last: number, from: number, to: number): number {
    const columns = this.#columns;
    let worst = Number.NaN;
    for (let line = first; line < last; line++) {
      const start = this.#store.rows[line]! * columns;
      for (let column = from; column < Math.max(to, from + 1); column++) {
        const score = this.#scores[start + column]!;
        if (!(Math.abs(score) <= Math.abs(worst))) worst = Number.isNaN(score) ? worst : score;
      }
    }
    return worst;
  }

  #drawLabels(context: CanvasRenderingContext2D, left: number, height: number): void {
    const { rows } = this.#store;
    context.fillStyle = this.#palette.text;
    setLabelFont(context);
    const chosen = this.#store.chosen ? rows.indexOf(this.#store.chosen.row) : -1;
    const each = Math.max(1, Math.ceil(13 / this.#lineHeight));
    const scrolled = this.#view.scrollTop;
    const first = Math.floor(scrolled / this.#lineHeight);
    for (let line = first - (first % each); line < rows.length; line += each) {
      const y = (line + 0.5) * this.#lineHeight - scrolled;
      if (y > height) break;
      // The label of the chosen row is drawn with its mark.
      const isBeside = chosen >= 0 && Math.abs(line - chosen) * this.#lineHeight < 12;
      if (y < 4 || isBeside) continue;
      context.fillText(this.#label(rows[line]!), left - 6, y);
    }
  }

  /** As much of a site's name as fits beside its row: of a long one the end of the module's path. */
  #label(row: number): string {
    const { model } = this.#store;
    const room = Math.floor((this.#labels - 8) / 6.7);
    return tailOf(room < 26 ? model.arrow(row) + model.module(row) : model.shortName(row), room);
  }

  #drawAxis(context: CanvasRenderingContext2D, left: number, width: number, height: number): void {
    const { starts } = this.#store.model.header.axis;
    context.fillStyle = this.#palette.faint;
    context.textBaseline = "top";
    const count = Math.max(1, Math.min(starts.length, Math.floor(width / 90)));
    for (let tick = 0; tick <= count; tick++) {
      const column = Math.min(starts.length - 1, Math.round((tick * starts.length) / count));
      const x = left + ((column + 0.5) / starts.length) * width;
      context.textAlign = tick === count && count > 0 ? "right" : tick ? "center" : "left";
      if (starts.length) {
        const label = tick
          ? `${starts[column]}`
          : starts[column]! < 0
            ? "start"
            : `step ${starts[column]}`;
        context.fillText(label, x, height + 8);
        context.fillRect(x, height + 1, 1, 4);
      }
    }
  }

  #drawOverlay(): void {
    const { left, width, height } = this.#area;
    const context = sized(this.#overlay, this.#view.clientWidth, height + AXIS);
    const { model, chosen, rows } = this.#store;
    const columns = this.#columns;
    const wide = width / Math.max(columns, 1);
    const x = (column: number): number => left + column * wide;
    context.strokeStyle = this.#palette.accent;
    context.fillStyle = this.#palette.accent;
    if (model.header.first) {
      const at = x(model.column(model.header.first.step) + 0.5);
      context.beginPath();
      context.moveTo(at - 5, height + 8);
      context.lineTo(at + 5, height + 8);
      context.lineTo(at, height + 1);
      context.fill();
    }
    drawWatched(context, this.#store, {
      left,
      width,
      height,
      lineHeight: this.#lineHeight,
      scrolled: this.#view.scrollTop,
    });
    context.strokeStyle = this.#palette.accent;
    context.lineWidth = 2;
    const marks = this.#cursor ? [this.#cursor] : [];
    const line = chosen ? rows.indexOf(chosen.row) : -1;
    if (chosen && line >= 0) {
      const mark = { line, column: model.column(chosen.step) };
      marks.push(mark);
      const y = (line + 0.5) * this.#lineHeight - this.#view.scrollTop;
      context.fillStyle = this.#palette.accent;
      setLabelFont(context);
      context.fillText(this.#label(chosen.row), left - 6, y);
      if (!this.#cursor) this.#status.textContent = this.#describe(mark);
    }
    for (const mark of marks) {
      const y = mark.line * this.#lineHeight - this.#view.scrollTop;
      const tall = Math.max(this.#lineHeight, 5);
      context.lineWidth = 2;
      context.strokeRect(x(mark.column) - 1, y - 1, Math.max(wide, 5) + 2, tall + 2);
    }
  }

  #listen(): void {
    const view = this.#view;
    view.addEventListener("scroll", () => this.draw());
    view.addEventListener("mousemove", (event) => this.#point(this.#at(event)));
    view.addEventListener("mouseleave", () => this.#point(null));
    view.addEventListener("click", (event) => {
      this.#point(this.#at(event));
      this.#choose();
    });
    view.addEventListener("keydown", (event) => this.#key(event));
  }

  #at(event: MouseEvent): Cursor | null {
    const { left, width } = this.#area;
    const box = this.#canvas.getBoundingClientRect();
    const line = Math.floor((event.clientY - box.top + this.#view.scrollTop) / this.#lineHeight);
    const column = Math.floor(((event.clientX - box.left - left) / width) * this.#columns);
    const isInside = line >= 0 && line < this.#store.rows.length && column < this.#columns;
    return isInside && event.clientY - box.top <= this.#area.height
      ? { line, column: Math.max(column, 0) }
      : null;
  }

  #key(event: KeyboardEvent): void {
    const moves: Record<string, [number, number]> = {
      ArrowUp: [-1, 0],
      ArrowDown: [1, 0],
      ArrowLeft: [0, -1],
      ArrowRight: [0, 1],
      PageUp: [-20, 0],
      PageDown: [20, 0],
      Home: [0, -this.#columns],
      End: [0, this.#columns],
    };
    const move = moves[event.key];
    if (move) {
      const at = this.#cursor ?? this.#start();
      const line = at.line + move[0];
      const column = at.column + move[1];
      this.#point({
        line: Math.max(0, Math.min(line, this.#store.rows.length - 1)),
        column: Math.max(0, Math.min(column, this.#columns - 1)),
      });
      this.#reveal();
    } else if (event.key === "Enter" || event.key === " ") {
      this.#choose();
    } else return;
    event.preventDefault();
  }

  /** Where the keys begin: at the chosen cell, if it is shown. */
  #start(): Cursor {
    const { chosen, model, rows } = this.#store;
    const line = chosen ? rows.indexOf(chosen.row) : -1;
    if (!chosen || line < 0) return { line: 0, column: 0 };
    return { line, column: model.column(chosen.step) };
  }

  #reveal(): void {
    if (!this.#cursor || this.#isFit) return;
    const y = this.#cursor.line * this.#lineHeight;
    if (y < this.#view.scrollTop) this.#view.scrollTop = y;
    const end = y + this.#lineHeight - this.#area.height;
    if (end > this.#view.scrollTop) this.#view.scrollTop = end;
  }

  #point(cursor: Cursor | null): void {
    this.#cursor = cursor;
    this.#drawOverlay();
    if (cursor) this.#status.textContent = this.#describe(cursor);
  }

  #describe({ line, column }: Cursor): string {
    const row = this.#store.rows[line];
    return row === undefined ? "" : this.#cells.describe(row, column);
  }

  #choose(): void {
    const row = this.#cursor && this.#store.rows[this.#cursor.line];
    if (row == null || !this.#cursor) return;
    this.#store.choose(row, this.#store.model.header.axis.starts[this.#cursor.column] ?? 0);
  }
}

function setLabelFont(context: CanvasRenderingContext2D): void {
  context.font = "11px ui-monospace, monospace";
  context.textBaseline = "middle";
  context.textAlign = "right";
}

function sized(canvas: HTMLCanvasElement, width: number, height: number): CanvasRenderingContext2D {
  const ratio = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d")!;
  context.scale(ratio, ratio);
  return context;
}
