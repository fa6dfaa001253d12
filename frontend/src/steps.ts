// Loss, loss scale and gradient norm over the steps, with the events.
import { curves, type Line, lineColour, spans } from "./curves";
import { h, plainTable, scrolling, section } from "./dom";
import { formatCount, formatCounts } from "./format";
import { type Cell, type StepColumns, toNumber } from "./model";
import type { Store } from "./store";
import { notesOfSteps } from "./watched";

export const NUMBERS = [
  ["loss", "loss", false],
  ["scale", "loss scale", true],
  ["gradient_norm", "gradient norm", true],
  ["learning_rate", "learning rate", false],
] as const;
const MOST_MARKS = 200;
const MOST_EVENTS = 12;
const MOST_RANKS = 6;

export function steps(store: Store): HTMLElement {
  const charts = h("div", { class: "charts" });
  const show = (): void => charts.replaceChildren(...stepCharts(store));
  show();
  store.onTheme(show);
  return section("steps", "Steps", charts, eventTable(store));
}

function stepCharts(store: Store): HTMLElement[] {
  const { header, ranks } = store.model;
  const shown = ranks.slice(0, MOST_RANKS);
  const all = [...new Set(shown.flatMap((rank) => header.steps[rank]?.step ?? []))];
  const axis = all.sort((one, other) => one - other);
  const counted = header.events.filter((event) => event.counted).map((event) => event.step);
  const skipped = shown.flatMap((rank) => header.steps[rank]?.overflow ?? []);
  const columns = [...new Set([...counted, ...skipped])]
    .map((step) => axis.indexOf(step))
    .filter((column) => column >= 0)
    .sort((one, other) => one - other);
  const marks = spans(columns, axis).slice(0, MOST_MARKS);
  const made = NUMBERS.map(([key, title, isLogarithmic]) => {
    const lines = shown.map((rank, at): Line => {
      const label = store.model.hasSeveralRanks ? `rank ${rank}` : title;
      const mine = header.steps[rank];
      return { label, values: aligned(mine, mine?.[key] ?? [], axis), colour: lineColour(at) };
    });
    const notes = notesOfSteps(store.model, key);
    return curves({ title, steps: axis, lines, isLogarithmic, marks, notes });
  });
  const found = made.filter((one) => one !== null);
  return found.length ? found : [h("p", { class: "hint" }, "This log holds no loss or norm.")];
}

export function aligned(
  columns: StepColumns | undefined,
  cells: Cell[],
  axis: number[],
): (number | null)[] {
  const byStep = new Map(columns?.step.map((step, at) => [step, toNumber(cells[at] ?? null)]));
  return axis.map((step) => {
    const value = byStep.get(step);
    return value !== undefined && Number.isFinite(value) ? value : null;
  });
}

function eventTable(store: Store): HTMLElement {
  const { model } = store;
  const { events, event_count: count, verdicts } = model.header;
  if (!events.length) return h("p", {}, "No overflow event was found.");
  const rows = events
    .slice(0, MOST_EVENTS)
    .map((event) => [
      formatCount(event.step),
      ...(model.hasSeveralRanks ? [String(event.rank)] : []),
      event.row >= 0
        ? h(
            "button",
            { type: "button", class: "link", onClick: () => store.open(event.row, event.step) },
            event.where,
          )
        : event.where,
      formatCounts(event.counts) || "–",
      `${verdicts[event.verdict]}${event.counted ? "" : ", not counted"}`,
      event.reason + (event.line ? ` (${event.line})` : ""),
    ]);
  const rank = model.hasSeveralRanks ? ["rank"] : [];
  const caption = `${formatCount(count)} event${count === 1 ? "" : "s"}`;
  const more = count > rows.length ? `, the first ${rows.length} shown` : "";
  const table = plainTable(
    caption + more,
    ["step", ...rank, "tensor", "not finite", "verdict", "reason"],
    rows,
    new Set([0]),
  );
  table.id = "events";
  return scrolling("Events", table);
}
