// The options and the environment of the run, as the log's meta files have them.
import { h, section } from "./dom";
import { formatCount } from "./format";
import type { Store } from "./store";

export function environment(store: Store): HTMLElement {
  const { model } = store;
  const { header } = model;
  const parts = model.ranks.map((rank) => {
    const name = model.hasSeveralRanks ? `Rank ${rank}` : "Run";
    return h("details", {}, h("summary", {}, name), list(header.meta[rank] ?? {}));
  });
  const notes = [
    `${header.directory}: ${formatCount(header.records)} records, read by fastcheck ${header.fastcheck}.`,
    ...(header.damaged ? [`${formatCount(header.damaged)} damaged records are left out.`] : []),
    ...(header.dropped_bytes
      ? [`${formatCount(header.dropped_bytes)} bytes were cut short by a crash and are left out.`]
      : []),
  ];
  return section(
    "environment",
    "Environment and options",
    ...notes.map((note) => h("p", {}, note)),
    ...parts,
  );
}

function list(fields: Record<string, unknown>): HTMLElement {
  const items = Object.entries(fields).flatMap(([name, value]) => [
    h("dt", {}, name),
    h("dd", {}, shown(value)),
  ]);
  return h("dl", { class: "pairs" }, ...items);
}

function shown(value: unknown): Node | string {
  if (value === null || value === undefined) return "–";
  if (Array.isArray(value) && value.every((item) => typeof item !== "object"))
    return value.join(", ");
  if (typeof value === "object") return list(value as Record<string, unknown>);
  return String(value);
}
