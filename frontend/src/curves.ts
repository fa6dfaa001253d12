// Curves over steps, drawn by uPlot.
import uPlot from "uplot";
import { h } from "./dom";
import { formatNumber } from "./format";
import { range } from "./model";

export interface Line {
  label: string;
  values: (number | null)[];
  /** The smallest values of the buckets, where these are several steps. */
  low?: (number | null)[];
  colour: string;
  /** Of a broken line: lengths of its parts. */
  dash?: number[];
}

/** An event of the watch: its step, and the steps that it forecasts. */
export interface Note {
  step: number;
  interval: [number, number] | null;
}

export interface Chart {
  title: string;
  steps: number[];
  lines: Line[];
  isLogarithmic?: boolean;
  /** First and last step of what is marked in red: events. */
  marks?: [number, number][];
  notes?: Note[];
  /** A step that is chosen. */
  chosen?: number | null;
  format?: (value: number) => string;
  /** What the numbers of the axis are; "step" if left out. */
  xName?: string;
}

const HEIGHT = 170;
/** Between the ticks of steps. */
const INCREMENTS = range(16).flatMap((power) => [1, 2, 5].map((digit) => digit * 10 ** power));
const LINES = ["--line-1", "--line-2", "--line-3", "--line-4", "--line-5", "--line-6"];

/** The colour of the n-th line. */
export function lineColour(index: number): string {
  return variable(LINES[index % LINES.length]!);
}

/** A figure whose width follows that of the page; null where no line has a value. */
export function curves(chart: Chart): HTMLElement | null {
  const format = chart.format ?? formatNumber;
  const finite = chart.lines.flatMap((line) => line.values.filter((value) => value !== null));
  if (!finite.length) return null;
  const low = Math.min(...extremes(finite));
  const high = Math.max(...extremes(finite));
  const summary = `${chart.title}: ${format(low)} to ${format(high)}`;
  const label = `${summary}, ${chart.xName ?? "step"}s ${chart.steps[0]} to ${chart.steps.at(-1)}`;
  const plot = h("div", { class: "plot", role: "img", "aria-label": label });
  const readout = h("span", { class: "readout", "aria-hidden": "true" });
  const keys = chart.lines.length > 1 ? chart.lines.map(key) : [];
  const caption = h("p", { class: "caption" }, chart.title, ...keys, readout);
  let made: uPlot | null = null;
  new ResizeObserver(() => {
    if (!plot.clientWidth) return;
    if (made) made.setSize({ width: plot.clientWidth, height: HEIGHT });
    else made = draw(plot, chart, format, readout);
  }).observe(plot);
  return h("div", { class: "chart" }, caption, plot);
}

function key(line: Line): HTMLElement {
  const square = h("span", { class: "square", "aria-hidden": "true" });
  square.style.background = line.colour;
  return h("span", { class: "pair" }, square, line.label);
}

function draw(
  plot: HTMLElement,
  chart: Chart,
  format: (value: number) => string,
  readout: HTMLElement,
): uPlot {
  const isLogarithmic = chart.isLogarithmic ?? false;
  const shown = (values: (number | null)[]): (number | null)[] =>
    isLogarithmic ? values.map((value) => (value !== null && value > 0 ? value : null)) : values;
  const data: (number | null)[][] = [chart.steps];
  const series: uPlot.Series[] = [{}];
  const bands: uPlot.Band[] = [];
  for (const line of chart.lines) {
    const common = {
      stroke: line.colour,
      width: 1.5,
      points: { show: chart.steps.length < 40 },
      dash: line.dash ?? [],
      spanGaps: line.dash != null,
    };
    data.push(shown(line.values));
    series.push(common);
    if (line.low) {
      data.push(shown(line.low));
      series.push({ ...common, width: 1 });
      bands.push({ series: [data.length - 2, data.length - 1], fill: `${line.colour}33` });
    }
  }
  const axis = {
    stroke: variable("--faint"),
    grid: { stroke: variable("--grid"), width: 1 },
    ticks: { stroke: variable("--grid"), width: 1 },
    font: "11px system-ui, sans-serif",
  };
  const range = (_: uPlot, low: number | null, high: number | null): [number, number] => {
    if (low === null || high === null) return isLogarithmic ? [0.1, 1] : [0, 1];
    // Powers of two, for uPlot counts its ticks from the lower end.
    if (isLogarithmic) {
      return [2 ** Math.floor(Math.log2(low) - 0.2), 2 ** Math.ceil(Math.log2(high) + 0.2)];
    }
    const room = (high - low || Math.abs(high) || 1) * 0.08;
    // Of shares, losses and rates none is below 0.
    return [low < 0 ? low - room : Math.max(low - room, 0), high + room];
  };
  const across = (_: uPlot, low: number, high: number): [number, number] => {
    const [only, another] = data[0]!;
    // uPlot's range of one step has steps that are not there.
    if (typeof only === "number" && another === undefined) return [only - 0.5, only + 0.5];
    return [low, Math.max(high, forecastEnd(chart, low, high))];
  };
  return new uPlot(
    {
      width: plot.clientWidth,
      height: HEIGHT,
      series,
      bands,
      cursor: { sync: { key: "steps" } },
      legend: { show: false },
      scales: {
        x: { time: false, range: across },
        y: { range, distr: isLogarithmic ? 3 : 1, log: 2 },
      },
      axes: [
        { ...axis, incrs: INCREMENTS, values: (_, ticks) => ticks.map((tick) => String(tick)) },
        {
          ...axis,
          size: (_, labels) =>
            18 + 6.5 * Math.max(7, ...(labels ?? []).map(({ length }) => length)),
          // Of a round share no decimals.
          values: (_, ticks) =>
            ticks.map((tick) => (tick === null ? "" : format(tick).replace(/\.0+ %$/, " %"))),
        },
      ],
      hooks: {
        draw: [(drawn) => mark(drawn, chart)],
        setCursor: [
          ({ cursor }) => {
            readout.textContent = cursor.idx == null ? "" : reading(chart, cursor.idx, format);
          },
        ],
      },
    },
    data as uPlot.AlignedData,
    plot,
  );
}

/** The values of all lines at one of the steps. */
function reading(chart: Chart, at: number, format: (value: number) => string): string {
  const text = (value: number | null | undefined): string => (value == null ? "–" : format(value));
  const values = chart.lines.map(({ values, low }) =>
    low ? `${text(low[at])} to ${text(values[at])}` : text(values[at]),
  );
  return `${chart.xName ?? "step"} ${chart.steps[at]}: ${values.join(", ")}`;
}

/** Where the axis has to end to show the forecasts, as far as a quarter more of it does. */
function forecastEnd(chart: Chart, low: number, high: number): number {
  const ends = (chart.notes ?? []).map(({ interval }) => interval?.[1] ?? low);
  return Math.min(Math.max(low, ...ends), high + (high - low) / 4);
}

/** A line at each step of an event, a shade over those of a row of them. */
function mark(plot: uPlot, chart: Chart): void {
  const { ctx, bbox } = plot;
  const at = (step: number): number => {
    const x = Math.round(plot.valToPos(step, "x", true));
    return Math.max(bbox.left, Math.min(x, bbox.left + bbox.width));
  };
  const line = (step: number, colour: string, dash: number[]): void => {
    ctx.strokeStyle = colour;
    ctx.setLineDash(dash);
    ctx.beginPath();
    ctx.moveTo(at(step), bbox.top);
    ctx.lineTo(at(step), bbox.top + bbox.height);
    ctx.stroke();
  };
  ctx.save();
  ctx.lineWidth = window.devicePixelRatio || 1;
  for (const [first, last] of chart.marks ?? []) {
    ctx.fillStyle = `${variable("--bad")}22`;
    ctx.fillRect(at(first), bbox.top, at(last) - at(first), bbox.height);
    line(first, variable("--bad"), []);
  }
  for (const { step, interval } of chart.notes ?? []) {
    line(step, variable("--watch"), [6, 3]);
    if (!interval) continue;
    const [from, to] = interval.map(at) as [number, number];
    ctx.fillStyle = `${variable("--watch")}33`;
    ctx.fillRect(from, bbox.top, Math.max(to - from, ctx.lineWidth), bbox.height);
  }
  if (chart.chosen != null) line(chart.chosen, variable("--accent"), [4, 4]);
  ctx.restore();
}

/** Of ascending columns of an axis, those that follow each other as pairs of steps. */
export function spans(columns: number[], starts: number[]): [number, number][] {
  const found: [number, number][] = [];
  let before = Number.NaN;
  for (const column of columns) {
    const last = found.at(-1);
    if (last && column === before + 1) last[1] = starts[column]!;
    else found.push([starts[column]!, starts[column]!]);
    before = column;
  }
  return found;
}

function variable(name: string): string {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function extremes(values: number[]): [number, number] {
  let low = Number.POSITIVE_INFINITY;
  let high = Number.NEGATIVE_INFINITY;
  for (const value of values) {
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  return [low, high];
}
