// The events of the watch on the heat map: a diamond in the cell, and the interval of a forecast.
import type { Area } from "./matrix";
import { isShown, type Watched } from "./watched";
import type { Store } from "./store";

const SIZE = 5;

export function drawWatched(context: CanvasRenderingContext2D, store: Store, area: Area): void {
  const { header } = store.model;
  if (!header.watched?.length) return;
  const style = getComputedStyle(document.documentElement);
  const colours = ["--watch", "--back"].map((name) => style.getPropertyValue(name).trim()) as [
    string,
    string,
  ];
  const lines = new Map(store.mapRows.map((row, line) => [row, line]));
  context.save();
  for (const event of header.watched) {
    if (!isShown(store, event)) continue;
    const line = lines.get(event.row);
    // What is about a whole step, or a site that the filter hides, stands at the axis.
    const y = line === undefined ? area.height : (line + 0.5) * area.lineHeight - area.scrolled;
    if (y < 0 || y > area.height) continue;
    const x = placeOf(store, event.step, area);
    if (line !== undefined) drawForecast(context, store, area, event, y, colours);
    [context.fillStyle, context.strokeStyle] = colours;
    context.lineWidth = 1.5;
    context.beginPath();
    context.moveTo(x - SIZE, y);
    context.lineTo(x, y - SIZE);
    context.lineTo(x + SIZE, y);
    context.lineTo(x, y + SIZE);
    context.closePath();
    context.fill();
    context.stroke();
  }
  context.restore();
}

/** A dashed line up to where it may come, and a solid one over the interval. */
function drawForecast(
  context: CanvasRenderingContext2D,
  store: Store,
  area: Area,
  event: Watched,
  y: number,
  [colour, back]: [string, string],
): void {
  if (!event.interval) return;
  const [from, to] = event.interval.map((step) => placeOf(store, step, area)) as [number, number];
  const start = placeOf(store, event.step, area);
  const path = (dash: number[], ...lines: [number, number, number, number][]): void => {
    for (const [width, stroke] of [
      [5, back],
      [2, colour],
    ] as const) {
      context.lineWidth = width;
      context.strokeStyle = stroke;
      context.setLineDash(dash);
      context.beginPath();
      for (const [fromX, fromY, toX, toY] of lines) {
        context.moveTo(fromX, fromY);
        context.lineTo(toX, toY);
      }
      context.stroke();
    }
    context.setLineDash([]);
  };
  path([3, 3], [start, y, from, y]);
  path([], [from, y - SIZE, from, y + SIZE], [from, y, to, y], [to, y - SIZE, to, y + SIZE]);
}

/** The middle of a step's column; the right end for what lies behind the last step. */
function placeOf(store: Store, step: number, { left, width }: Area): number {
  const { starts, width: each } = store.model.header.axis;
  if (step >= (starts.at(-1) ?? 0) + each) return left + width;
  return left + ((store.model.column(step) + 0.5) / Math.max(starts.length, 1)) * width;
}
