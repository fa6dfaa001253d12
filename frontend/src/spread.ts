// How the overflow of the first event's step went from module to module.
import { h, section } from "./dom";
import { formatCount, formatCounts } from "./format";
import type { Place } from "./model";
import type { Store } from "./store";

const MOST = 24;

interface Passed {
  module: string;
  direction: string;
  places: Place[];
}

export function spread(store: Store): HTMLElement | null {
  const { model } = store;
  const { places, count } = model.header.spread;
  const { first } = model.header;
  if (!first || !places.length) return null;
  const passed: Passed[] = [];
  for (const place of places) {
    if (place.row < 0) continue;
    const module = model.module(place.row);
    const direction = model.text("direction", place.row);
    const last = passed.at(-1);
    if (last?.module === module && last.direction === direction) last.places.push(place);
    else passed.push({ module, direction, places: [place] });
  }
  const modules = new Set(passed.map((one) => one.module)).size;
  const list = h("ol", { class: "flow" });
  const append = (some: Passed[]): void => {
    list.append(...some.map((one) => item(store, one, first.step)));
  };
  append(passed.slice(0, MOST));
  const rest = passed.slice(MOST);
  const more = h(
    "button",
    {
      type: "button",
      class: "more",
      hidden: !rest.length,
      onClick: () => {
        append(rest);
        more.hidden = true;
      },
    },
    `Show ${formatCount(rest.length)} more`,
  );
  const rank = model.hasSeveralRanks ? ` on rank ${first.rank}` : "";
  return section(
    "spread",
    "How it spread",
    h(
      "p",
      {},
      `In step ${formatCount(first.step)}${rank} ${formatCount(count)} tensors of ` +
        `${formatCount(modules)} modules were not finite, in the order of the device:`,
    ),
    list,
    more,
  );
}

function item(store: Store, { module, direction, places }: Passed, step: number): HTMLElement {
  const { model } = store;
  const head = places[0]!;
  const verdict = model.header.verdicts[head.verdict] ?? "";
  const began = verdict === "origin" || verdict === "arrived";
  const more = places.length > 1 ? ` and ${places.length - 1} more` : "";
  return h(
    "li",
    { class: `${direction}${began ? " began" : ""}` },
    h(
      "button",
      { type: "button", class: "link", onClick: () => store.choose(head.row, step) },
      module,
    ),
    h("span", {}, `${direction}, ${model.text("name", head.row)}${more}`),
    h("span", {}, formatCounts(head.counts)),
    verdict === "none" || !verdict ? null : h("span", { class: "tag" }, verdict),
  );
}
