// How the overflow of the first event's step went from tensor to tensor: boxes and their edges.
import { h, section } from "./dom";
import { formatCount, formatCounts } from "./format";
import type { Place } from "./model";
import type { Store } from "./store";

const MOST = 24;
const MOST_SOURCES = 6;

/** Neighbouring places of a module in one direction: one box. */
interface Box {
  module: string;
  direction: string;
  places: Place[];
  /** Numbers of the boxes that it read from, or that the verdict derives it from. */
  read: number[];
  follows: number[];
}

export function spread(store: Store): HTMLElement | null {
  const { model } = store;
  const { places, count } = model.header.spread;
  const { first } = model.header;
  if (!first || !places.length) return null;
  const boxes = boxesOf(store, places);
  const modules = new Set(boxes.map((box) => box.module)).size;
  const list = h("ol", { class: "flow" });
  const append = (some: Box[], from: number): void => {
    list.append(
      ...some.map((box, at) => item(store, box, boxes[from + at + 1], from + at, first.step)),
    );
  };
  append(boxes.slice(0, MOST), 0);
  const rest = boxes.slice(MOST);
  const more = h(
    "button",
    {
      type: "button",
      class: "more",
      hidden: !rest.length,
      onClick: () => {
        append(rest, MOST);
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
      `In step ${formatCount(first.step)}${rank}, ${formatCount(count)} tensors of ` +
        `${formatCount(modules)} modules were not finite. Numbers give their order on the device. ` +
        edgesText(boxes),
    ),
    list,
    more,
  );
}

function edgesText(boxes: Box[]): string {
  const hasRead = boxes.some((box) => box.read.length);
  const hasFollows = boxes.some((box) => box.follows.length);
  const texts = [
    hasRead
      ? "“reads 1”: an operator of this box read the tensor of box 1."
      : 'Only level="op" records which operator read which tensor.',
    ...(hasFollows
      ? ["“follows from 1”: by its verdict it comes from box 1, through any number of tensors."]
      : []),
    ...(hasRead || hasFollows
      ? ["An arrow leads to the next box if that comes from this one."]
      : []),
  ];
  return texts.join(" ");
}

function boxesOf(store: Store, places: Place[]): Box[] {
  const { model } = store;
  const boxes: Box[] = [];
  const boxOf: number[] = [];
  for (const place of places) {
    const module = place.row < 0 ? "" : model.module(place.row);
    const direction = place.row < 0 ? "" : model.text("direction", place.row);
    const last = boxes.at(-1);
    if (!last || last.module !== module || last.direction !== direction) {
      boxes.push({ module, direction, places: [], read: [], follows: [] });
    }
    boxes.at(-1)!.places.push(place);
    boxOf.push(boxes.length - 1);
  }
  boxes.forEach((box, number) => {
    const sources = (kind: "read" | "follows"): number[] => {
      const found = box.places.flatMap((place) => place[kind].map((one) => boxOf[one]!));
      return [...new Set(found)].filter((one) => one !== number).sort((one, other) => one - other);
    };
    box.read = sources("read");
    box.follows = sources("follows").filter((one) => !box.read.includes(one));
  });
  return boxes;
}

function item(
  store: Store,
  box: Box,
  next: Box | undefined,
  number: number,
  step: number,
): HTMLElement {
  const { model } = store;
  const head = box.places[0]!;
  const verdict = model.header.verdicts[head.verdict] ?? "";
  const began = verdict === "origin" || verdict === "arrived";
  const more = box.places.length > 1 ? ` and ${box.places.length - 1} more` : "";
  const leads = next?.read.includes(number) || next?.follows.includes(number);
  const name = box.module || (head.row < 0 ? "name lost" : model.text("name", head.row));
  const open = (): void => store.open(head.row, step);
  return h(
    "li",
    { class: `${box.direction}${began ? " began" : ""}${leads ? " leads" : ""}` },
    h(
      "span",
      {},
      `${number + 1}. `,
      head.row < 0 ? name : h("button", { type: "button", class: "link", onClick: open }, name),
    ),
    head.row < 0 ? null : h("span", {}, `${box.direction}, ${model.text("name", head.row)}${more}`),
    h("span", {}, formatCounts(head.counts)),
    sourcesText("reads", box.read),
    sourcesText("follows from", box.follows),
    verdict === "none" || !verdict ? null : h("span", { class: "tag" }, verdict),
  );
}

function sourcesText(verb: string, sources: number[]): HTMLElement | null {
  if (!sources.length) return null;
  const shown = sources.slice(0, MOST_SOURCES).map((one) => String(one + 1));
  const more = sources.length > shown.length ? ` and ${sources.length - shown.length} more` : "";
  return h("span", { class: "from" }, `${verb} ${shown.join(", ")}${more}`);
}
