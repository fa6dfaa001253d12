// Lines by steps on a canvas, each cell in the colour of its score; moved in with mouse and keys.
import { isDiverging, type Mode, type Palette, palette } from "./colours";
import { h } from "./dom";
import { range } from "./model";
import { DIFFERS, NOT_FINITE } from "./scores";

const AXIS = 28;
/** Where the labels of the axis begin, below the mark of the first event. */
const TICKS = 12;
const TALLEST = 620;
const READABLE = 15;
/** Pixels of a marked cell, where a line has fewer. */
const LEAST_MARK = 3;
/** Pixels between the cursor and the tip. */
const TIP = 14;

export interface Cursor {
  /** Index into the rows that are shown. */
  line: number;
  column: number;
}

/** Where cells are drawn, in CSS pixels. */
export interface Area {
  left: number;
  width: number;
  height: number;
  lineHeight: number;
  scrolled: number;
}

/** What a matrix shows. A score is that of `rows()[line] * starts.length + column`. */
export interface Lines {
  id: string;
  label: string;
  /** The first step of each column. */
  starts: number[];
  rows(): number[];
  scores(mode: Mode): Float32Array;
  /** A name of at most `room` characters. */
  name(row: number, room: number): string;
  describe(row: number, column: number): string;
  choose(row: number, column: number): void;
  chosen(): { row: number; column: number } | null;
  /** The column of the first event; null: there is none. */
  first: number | null;
  /** Rows whose name and cells are shown wherever there is room for them. */
  marked?: ReadonlySet<number>;
  drawOver?(context: CanvasRenderingContext2D, area: Area): void;
}

export class Matrix {
  readonly element: HTMLElement;
  readonly status = h("p", { class: "status", role: "status", "aria-live": "polite" });
  /** What is under the cursor, beside it; `status` has the same for a screen reader. */
  readonly tip = h("div", { class: "tip", "aria-hidden": "true", hidden: true });
  readonly #lines: Lines;
  readonly #canvas = h("canvas");
  readonly #overlay = h("canvas", { class: "overlay" });
  readonly #stage = h("div", { class: "stage" }, this.#canvas, this.#overlay);
  readonly #spacer = h("div", {}, this.#stage);
  #mode: Mode;
  #isFit = true;
  #rows: number[];
  #scores: Float32Array;
  #palette: Palette;
  #cursor: Cursor | null = null;

  constructor(lines: Lines, mode: Mode) {
    this.#lines = lines;
    this.#mode = mode;
    this.#rows = lines.rows();
    this.#scores = lines.scores(mode);
    this.#palette = palette(mode);
    this.element = h("div", {
      class: "heatmap",
      id: `${lines.id}-view`,
      tabindex: 0,
      role: "application",
      "aria-label": lines.label,
      "aria-describedby": `${lines.id}-keys`,
    });
    this.element.append(this.#spacer);
    this.#listen();
    new ResizeObserver(() => this.draw()).observe(this.element);
    window.addEventListener("beforeprint", () => this.draw());
  }

  get mode(): Mode {
    return this.#mode;
  }

  get palette(): Palette {
    return this.#palette;
  }

  /** All rows at once, or a height for each in which its name can be read. */
  set isFit(isFit: boolean) {
    this.#isFit = isFit;
    this.draw();
  }

  /** Takes the scores, and the colours of the theme, anew. */
  setMode(mode: Mode): void {
    this.#mode = mode;
    this.#scores = this.#lines.scores(mode);
    this.#palette = palette(mode);
    this.draw();
  }

  rowsChanged(): void {
    this.#cursor = null;
    this.#rows = this.#lines.rows();
    this.draw();
  }

  draw(): void {
    if (!this.element.clientWidth) return;
    const area = this.#area;
    this.#spacer.style.height = `${this.#rows.length * area.lineHeight + AXIS}px`;
    this.element.style.height = `${area.height + AXIS + 2}px`;
    const context = sized(this.#canvas, this.element.clientWidth, area.height + AXIS);
    this.#drawCells(context, area);
    this.#drawLabels(context, area);
    this.#drawAxis(context, area);
    this.#drawOverlay();
  }

  get #columns(): number {
    return this.#lines.starts.length;
  }

  get #area(): Area {
    const rows = this.#rows.length;
    const lineHeight = this.#isFit ? Math.min(22, TALLEST / Math.max(rows, 1)) : READABLE;
    const left = Math.min(230, Math.max(154, this.element.clientWidth * 0.26));
    return {
      left,
      width: Math.max(this.element.clientWidth - left - 8, 10),
      height: Math.min(rows * lineHeight, TALLEST),
      lineHeight,
      scrolled: this.element.scrollTop,
    };
  }

  /** Each pixel shows the cell that is farthest from the ordinary of those that it covers. */
  #drawCells(context: CanvasRenderingContext2D, area: Area): void {
    const { left, width, height, lineHeight, scrolled } = area;
    const ratio = context.canvas.width / this.element.clientWidth;
    const wide = Math.max(1, Math.round(width * ratio));
    const tall = Math.max(1, Math.round(height * ratio));
    const image = context.createImageData(wide, tall);
    const rows = this.#rows.length;
    const columns = this.#columns;
    const bounds = Array.from({ length: wide + 1 }, (_, x) => Math.floor((x * columns) / wide));
    const line = (y: number): number =>
      Math.max(0, Math.min(Math.floor((y / ratio + scrolled) / lineHeight), rows));
    const worst = new Float32Array(columns);
    // A marked line is as tall as can be seen, and covers the others where they are thinner.
    const each = lineHeight * ratio;
    const least = LEAST_MARK * ratio;
    const { marked } = this.#lines;
    const thin =
      marked && each < least && !scrolled
        ? range(rows).filter((at) => marked.has(this.#rows[at]!))
        : [];
    let shown = "";
    for (let y = 0; y < tall; y++) {
      const first = Math.min(line(y), rows - 1);
      const last = Math.max(line(y + 1), first + 1);
      const near = thin.filter((at) => Math.abs((at + 0.5) * each - y - 0.5) * 2 <= least);
      const key = `${first} ${last} ${near.join(" ")}`;
      if (y && shown === key) {
        image.data.copyWithin(y * wide * 4, (y - 1) * wide * 4, y * wide * 4);
        continue;
      }
      shown = key;
      worst.fill(Number.NaN);
      if (near.length) for (const at of near) this.#addWorst(worst, at);
      else for (let at = first; at < last; at++) this.#addWorst(worst, at);
      for (let x = 0; x < wide; x++) {
        let score = Number.NaN;
        for (let at = bounds[x]!; at < Math.max(bounds[x + 1]!, bounds[x]! + 1); at++) {
          score = farther(score, worst[at]!);
        }
        const colour = this.#colour(score);
        const place = (y * wide + x) * 4;
        image.data[place] = colour[0];
        image.data[place + 1] = colour[1];
        image.data[place + 2] = colour[2];
        image.data[place + 3] = 255;
      }
    }
    context.putImageData(image, Math.round(left * ratio), 0);
  }

  #addWorst(worst: Float32Array, line: number): void {
    const start = this.#rows[line]! * this.#columns;
    for (let column = 0; column < worst.length; column++) {
      worst[column] = farther(worst[column]!, this.#scores[start + column]!);
    }
  }

  #colour(score: number): readonly [number, number, number] {
    const { ramp, bad, differs, none } = this.#palette;
    if (Number.isNaN(score)) return none;
    if (score === NOT_FINITE) return bad;
    if (score === DIFFERS) return differs;
    const least = isDiverging(this.#mode) ? -1 : 0;
    return ramp[Math.round(((score - least) / (1 - least)) * 255)]!;
  }

  #drawLabels(context: CanvasRenderingContext2D, area: Area): void {
    const rows = this.#rows;
    const { height, lineHeight, scrolled } = area;
    setLabelFont(context);
    const middle = (line: number): number => (line + 0.5) * lineHeight - scrolled;
    const chosen = this.#lines.chosen();
    // The label of the chosen row is drawn with its mark, over the others.
    const taken = chosen ? [rows.indexOf(chosen.row)].filter((line) => line >= 0) : [];
    const isFree = (line: number): boolean =>
      taken.every((other) => Math.abs(line - other) * lineHeight >= 12);
    context.fillStyle = this.#palette.mark;
    const { marked } = this.#lines;
    if (marked) {
      for (let line = 0; line < rows.length; line++) {
        if (!marked.has(rows[line]!)) continue;
        const y = middle(line);
        if (y < 0 || y > height) continue;
        context.fillRect(area.left - 4, y - 1, 4, 2);
        if (!isFree(line)) continue;
        context.fillText(this.#label(rows[line]!, area), area.left - 6, Math.max(y, 6));
        taken.push(line);
      }
    }
    context.fillStyle = this.#palette.text;
    const each = Math.max(1, Math.ceil(13 / lineHeight));
    const first = Math.floor(scrolled / lineHeight);
    for (let line = first - (first % each); line < rows.length; line += each) {
      const y = middle(line);
      if (y > height) break;
      if (y < 4 || !isFree(line)) continue;
      context.fillText(this.#label(rows[line]!, area), area.left - 6, Math.max(y, 6));
    }
  }

  #label(row: number, { left }: Area): string {
    return this.#lines.name(row, Math.floor((left - 8) / 6.7));
  }

  #drawAxis(context: CanvasRenderingContext2D, { left, width, height }: Area): void {
    const { starts } = this.#lines;
    context.fillStyle = this.#palette.faint;
    context.textBaseline = "top";
    context.textAlign = "right";
    context.fillText("step", left - 6, height + TICKS);
    for (const [column, label] of roundTicks(starts, width / 70)) {
      const x = left + ((column + 0.5) / starts.length) * width;
      const half = context.measureText(label).width / 2;
      context.textAlign = "center";
      context.fillText(
        label,
        Math.max(left + half, Math.min(x, left + width + 8 - half)),
        height + TICKS,
      );
      context.fillRect(x, height + 1, 1, 4);
    }
  }

  #drawOverlay(): void {
    const area = this.#area;
    const { left, width, height, lineHeight, scrolled } = area;
    const context = sized(this.#overlay, this.element.clientWidth, height + AXIS);
    const wide = width / Math.max(this.#columns, 1);
    const x = (column: number): number => left + column * wide;
    context.strokeStyle = this.#palette.accent;
    context.fillStyle = this.#palette.accent;
    if (this.#lines.first !== null) {
      const at = x(this.#lines.first + 0.5);
      context.beginPath();
      context.moveTo(at - 5, height + 8);
      context.lineTo(at + 5, height + 8);
      context.lineTo(at, height + 1);
      context.fill();
    }
    this.#lines.drawOver?.(context, area);
    context.strokeStyle = this.#palette.accent;
    const marks = this.#cursor ? [this.#cursor] : [];
    const mark = this.#chosenMark();
    if (mark) {
      marks.push(mark);
      context.fillStyle = this.#palette.accent;
      setLabelFont(context);
      const y = (mark.line + 0.5) * lineHeight - scrolled;
      context.fillText(this.#label(this.#rows[mark.line]!, area), left - 6, y);
      if (!this.#cursor) this.status.textContent = this.#describe(mark);
    }
    for (const { line, column } of marks) {
      const tall = Math.max(lineHeight, 5);
      context.lineWidth = 2;
      const y = line * lineHeight - scrolled - 1;
      context.strokeRect(x(column) - 1, y, Math.max(wide, 5) + 2, tall + 2);
    }
  }

  #chosenMark(): Cursor | null {
    const chosen = this.#lines.chosen();
    const line = chosen ? this.#rows.indexOf(chosen.row) : -1;
    return chosen && line >= 0 ? { line, column: chosen.column } : null;
  }

  #listen(): void {
    const view = this.element;
    view.addEventListener("scroll", () => this.draw());
    view.addEventListener("mousemove", (event) => {
      this.#point(this.#at(event), [event.clientX, event.clientY]);
    });
    view.addEventListener("mouseleave", () => this.#point(null));
    view.addEventListener("blur", () => (this.tip.hidden = true));
    window.addEventListener("scroll", () => (this.tip.hidden = true), { passive: true });
    view.addEventListener("click", (event) => {
      this.#point(this.#at(event));
      this.#choose();
    });
    view.addEventListener("keydown", (event) => this.#key(event));
  }

  #at(event: MouseEvent): Cursor | null {
    const { left, width, height, lineHeight, scrolled } = this.#area;
    const box = this.#canvas.getBoundingClientRect();
    const line = Math.floor((event.clientY - box.top + scrolled) / lineHeight);
    const column = Math.floor(((event.clientX - box.left - left) / width) * this.#columns);
    const isInside = line >= 0 && line < this.#rows.length && column < this.#columns;
    return isInside && event.clientY - box.top <= height
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
      // The keys begin at the chosen cell, if it is shown.
      const at = this.#cursor ?? this.#chosenMark() ?? { line: 0, column: 0 };
      const line = at.line + move[0];
      const column = at.column + move[1];
      this.#point({
        line: Math.max(0, Math.min(line, this.#rows.length - 1)),
        column: Math.max(0, Math.min(column, this.#columns - 1)),
      });
      this.#reveal();
      this.#showTip(this.#placeOfCursor());
    } else if (event.key === "Enter" || event.key === " ") {
      this.#choose();
    } else return;
    event.preventDefault();
  }

  #reveal(): void {
    if (!this.#cursor || this.#isFit) return;
    const { lineHeight, height } = this.#area;
    const y = this.#cursor.line * lineHeight;
    if (y < this.element.scrollTop) this.element.scrollTop = y;
    const end = y + lineHeight - height;
    if (end > this.element.scrollTop) this.element.scrollTop = end;
  }

  #point(cursor: Cursor | null, place?: [number, number]): void {
    this.#cursor = cursor;
    this.#drawOverlay();
    if (cursor) this.status.textContent = this.#describe(cursor);
    this.#showTip(cursor && place ? place : null);
  }

  /** Where the cell under the cursor is in the window. */
  #placeOfCursor(): [number, number] {
    const { left, width, lineHeight, scrolled } = this.#area;
    const { line, column } = this.#cursor!;
    const box = this.#canvas.getBoundingClientRect();
    const x = box.left + left + ((column + 0.5) / Math.max(this.#columns, 1)) * width;
    return [x, box.top + (line + 1) * lineHeight - scrolled];
  }

  /** Beside a place of the window, and inside the window. */
  #showTip(place: [number, number] | null): void {
    this.tip.hidden = place === null;
    if (!place || !this.#cursor) return;
    this.tip.textContent = this.#describe(this.#cursor);
    const [x, y] = place;
    const { offsetWidth: wide, offsetHeight: tall } = this.tip;
    const { clientWidth, clientHeight } = document.documentElement;
    const isLow = y + TIP + tall > clientHeight;
    this.tip.style.left = `${Math.max(4, Math.min(x + TIP, clientWidth - wide - 4))}px`;
    this.tip.style.top = `${isLow ? Math.max(4, y - TIP - tall) : y + TIP}px`;
  }

  #describe({ line, column }: Cursor): string {
    const row = this.#rows[line];
    return row === undefined ? "" : this.#lines.describe(row, column);
  }

  #choose(): void {
    const row = this.#cursor && this.#rows[this.#cursor.line];
    if (row == null || !this.#cursor) return;
    this.#lines.choose(row, this.#cursor.column);
  }
}

/** Columns and their labels: steps that are round numbers, about as many as `most`. */
function roundTicks(starts: number[], most: number): [number, string][] {
  const first = starts[0] ?? 0;
  const last = starts.at(-1) ?? 0;
  const found: [number, string][] = first < 0 ? [[0, "start"]] : [];
  const each = roundAbove((last - Math.max(first, 0)) / Math.max(most, 1));
  const gaps = starts.slice(1).map((start, at) => start - starts[at]!);
  const width = gaps.length ? Math.min(...gaps) : 1;
  starts.forEach((start, column) => {
    // The first round step of the column's.
    const step = Math.ceil(Math.max(start, 0) / each) * each;
    const isNear = found.length > 0 && (column - found.at(-1)![0]) * most < starts.length / 2;
    if (step < start + width && !isNear) found.push([column, String(step)]);
  });
  return found.length ? found : starts.slice(0, 1).map((start) => [0, String(start)]);
}

/** The least of 1, 2, 5, 10, 20, 50, ... that is not below `value`. */
function roundAbove(value: number): number {
  const power = 10 ** Math.max(Math.floor(Math.log10(Math.max(value, 1))), 0);
  return [1, 2, 5, 10].map((digit) => digit * power).find((round) => round >= value) ?? power;
}

/** The score that is farther from the ordinary; NaN is none. */
function farther(score: number, other: number): number {
  return Math.abs(score) >= Math.abs(other) || Number.isNaN(other) ? score : other;
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
