// What install(watch=) found unusual: a table of its events, and where the curves show them.
import type { Note } from "./curves";
import { h, plainTable, scrolling, section } from "./dom";
import { formatCount, formatNumber } from "./format";
import { type Cell, type Model, toNumber } from "./model";
import type { Store } from "./store";

/** `row` is -1 for what is about a whole step; `interval`: steps of a forecast. */
export interface Watched {
  step: number;
  rank: number;
  kind: string;
  row: number;
  where: string;
  value: Cell;
  reference: Cell;
  score: Cell;
  is_warning: boolean;
  cause: string;
  interval: [number, number] | null;
  mover: { row: number; step: number; text: string } | null;
  text: string;
}

const MOST = 30;
/** The curve of each step's numbers on which a kind is marked. */
const CURVES: Record<string, string> = {
  loss_spike: "loss",
  loss_rise: "loss",
  gradient_spike: "gradient_norm",
  update: "gradient_norm",
  loss_scale: "scale",
  settings: "learning_rate",
};

export function watched(store: Store): HTMLElement | null {
  const { model } = store;
  const { watched: events, watch_count: count } = model.header;
  if (!events?.length) return null;
  const body = h("div", {});
  const show = (shown: number): void => {
    const left = Math.min(events.length, count) - shown;
    const more = h(
      "button",
      { type: "button", class: "more", onClick: () => show(events.length) },
      `Show ${formatCount(left)} more`,
    );
    body.replaceChildren(
      scrolling("Events of the watch", table(store, events.slice(0, shown))),
      left > 0 ? more : "",
    );
  };
  show(Math.min(MOST, events.length));
  const warnings = events.filter((event) => event.is_warning).length;
  const cut = count > events.length ? ` The first ${formatCount(events.length)} are here.` : "";
  return section(
    "watch",
    "What was unusual",
    h(
      "p",
      {},
      `${formatCount(count)} event${count === 1 ? "" : "s"} of the watch, ${formatCount(warnings)} ` +
        `with a warning.${cut} In the heat map a diamond marks an event, and a bracket the steps for ` +
        "which an overflow is forecast.",
    ),
    body,
  );
}

function table(store: Store, events: Watched[]): HTMLElement {
  const { model } = store;
  const several = model.hasSeveralRanks;
  const made = plainTable(
    "In the order of steps. The cause is what the records show, not a proof.",
    [
      "step",
      ...(several ? ["rank"] : []),
      "kind",
      "tensor",
      "value",
      "usual",
      "forecast, steps",
      "first mover",
      "cause",
      "in words",
    ],
    events.map((event) => [
      formatCount(event.step),
      ...(several ? [String(event.rank)] : []),
      h("span", event.is_warning ? { class: "tag" } : {}, event.kind.replace("_", " ")),
      link(store, event.row, event.step, event.where || "the step"),
      formatNumber(toNumber(event.value)),
      formatNumber(toNumber(event.reference)),
      event.interval
        ? `${formatCount(event.interval[0])} to ${formatCount(event.interval[1])}`
        : "–",
      event.mover ? link(store, event.mover.row, event.mover.step, event.mover.text) : "–",
      event.cause || "–",
      event.text,
    ]),
    new Set(several ? [0, 4, 5] : [0, 3, 4]),
  );
  made.id = "watched";
  return made;
}

function link(store: Store, row: number, step: number, text: string): Node {
  if (row < 0) return document.createTextNode(text);
  const choose = (): void => store.open(row, step);
  return h("button", { type: "button", class: "link", onClick: choose }, text);
}

/** Whether the filter of ranks leaves it. */
export function isShown(store: Store, event: Watched): boolean {
  return !store.filter.rank || String(event.rank) === store.filter.rank;
}

/** The events of a row in the steps of a bucket. */
export function watchedIn(model: Model, row: number, from: number, width: number): Watched[] {
  return (model.header.watched ?? []).filter(
    (event) => event.row === row && event.step >= from && event.step < from + width,
  );
}

/** What the curves of these rows show. */
export function notesOf(model: Model, rows: number[]): Note[] {
  return (model.header.watched ?? [])
    .filter((event) => rows.includes(event.row))
    .map(({ step, interval }) => ({ step, interval }));
}

/** What the curve of a number of each step shows. */
export function notesOfSteps(model: Model, key: string): Note[] {
  return (model.header.watched ?? [])
    .filter((event) => CURVES[event.kind] === key)
    .map(({ step, interval }) => ({ step, interval }));
}
