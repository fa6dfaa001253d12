// The page of a dump: each operator's inputs and outputs, with histograms of their values.
import { formatTimes } from "./difference";
import { h, plainTable, scrolling, section, select } from "./dom";
import { formatCount, formatCounts, formatNumber, formatShare } from "./format";
import { type Cell, toNumber } from "./model";

interface Histogram {
  low: number;
  high: number;
  counts: number[];
}

interface Reference {
  error: Cell;
  allowed: Cell;
  max_abs: Cell;
  max_ulp: Cell;
  cosine: Cell;
  differing: Cell;
  nonfinite: Cell;
  is_different: boolean;
}

interface Tensor {
  side: "in" | "out";
  label: string;
  role: string;
  dtype: string;
  shape: number[] | null;
  counts: [number, number, number] | null;
  zeros?: number;
  min?: Cell;
  max?: Cell;
  mean?: Cell;
  rms?: Cell;
  histogram: Histogram | null;
  reference: Reference | null;
}

interface Call {
  number: number;
  kind: string;
  op: string;
  ran: string;
  direction: string;
  module: string;
  type: string;
  call: string;
  args: string;
  in_count: number;
  out_count: number;
  tensors: Tensor[];
}

export interface DumpHeader {
  kind: "dump";
  culprit: number | null;
  calls: Call[];
}

const HEIGHT = 44;
const WIDTH = 160;
const SVG = "http://www.w3.org/2000/svg";

export function dumpParts(header: DumpHeader): HTMLElement[] {
  const first =
    header.culprit === null ? header.calls.find((call) => call.kind === "op") : undefined;
  const items = header.calls.map((call) =>
    item(call, call.number === header.culprit, call === first),
  );
  const list = h("div", { id: "calls" }, ...items);
  const search = h("input", {
    type: "search",
    id: "calls-search",
    placeholder: "part of a name",
    autocomplete: "off",
    onInput: () => show(),
  });
  let chosen = "";
  const count = h("output", { for: "calls-search" });
  const show = (): void => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    let left = 0;
    header.calls.forEach((call, at) => {
      const name = titleOf(call).toLowerCase();
      const isKind =
        !chosen ||
        (chosen === "bad" ? isBad(call) : call.tensors.some((one) => one.reference?.is_different));
      const isShown = isKind && words.every((word) => name.includes(word));
      items[at]!.hidden = !isShown;
      left += Number(isShown);
    });
    count.textContent = `${formatCount(left)} of ${formatCount(items.length)} calls`;
  };
  const kinds = select(
    "Show",
    [
      ["", "all calls"],
      ["bad", "not finite"],
      ["different", "differ from the reference"],
    ],
    "",
    (value) => {
      chosen = value;
      show();
    },
  );
  show();
  // What is folded is not printed.
  window.addEventListener("beforeprint", () => {
    for (const one of items) one.open = true;
  });
  const hint =
    "In the order of the calls. A histogram has intervals of equal width from the smallest to the " +
    "largest finite value; its heights are logarithmic.";
  return [
    section(
      "operators",
      "Operators",
      h("p", { class: "hint" }, hint),
      h(
        "form",
        { class: "filters", onSubmit: (event: Event) => event.preventDefault() },
        h("label", {}, h("span", {}, "Search"), search),
        kinds,
        count,
      ),
      list,
    ),
  ];
}

function titleOf(call: Call): string {
  const op = call.op || call.kind;
  const again = Number(call.call) ? ` #${call.call}` : "";
  const ran = call.ran && call.ran !== call.op ? ` (${call.ran})` : "";
  return [call.module || call.type, `${op}${again}${ran}`, call.direction]
    .filter(Boolean)
    .join(" · ");
}

function isBad(call: Call): boolean {
  return call.tensors.some((one) => one.counts?.some((count) => count > 0));
}

function item(call: Call, isCulprit: boolean, isOpen: boolean): HTMLDetailsElement {
  const tags = [
    ...(isCulprit ? ["first"] : []),
    ...(isBad(call) ? ["not finite"] : []),
    ...(call.tensors.some((one) => one.reference?.is_different)
      ? ["differs from the reference"]
      : []),
  ];
  const made = h(
    "details",
    { class: `call${isCulprit ? " culprit" : ""}`, open: isCulprit || isOpen },
    h(
      "summary",
      {},
      `${call.number}. ${titleOf(call)} `,
      ...tags.map((text) => h("span", { class: "tag" }, `${text} `)),
    ),
  );
  // Histograms of all calls at once would be thousands of elements.
  const fill = (): void => {
    if (made.open && made.childElementCount === 1) made.append(...body(call));
  };
  made.addEventListener("toggle", fill);
  fill();
  return made;
}

function body(call: Call): HTMLElement[] {
  const hasReference = call.tensors.some((one) => one.reference);
  const number = (cell: Cell | undefined): string => formatNumber(toNumber(cell ?? null));
  const rows = call.tensors.map((one) => [
    `${one.side === "in" ? "→ " : "← "}${one.label || one.role || "?"}`,
    `${one.dtype} ${one.shape ? one.shape.join("×") || "scalar" : ""}`,
    one.histogram ? histogram(one) : "no values",
    one.counts
      ? h("span", one.counts.some(Boolean) ? { class: "tag" } : {}, formatCounts(one.counts) || "–")
      : "–",
    number(one.min),
    number(one.max),
    number(one.mean),
    number(one.rms),
    formatShare(one.zeros ?? Number.NaN),
    ...(hasReference ? [one.reference ? reference(one.reference) : "–"] : []),
  ]);
  const cut = call.in_count + call.out_count - call.tensors.length;
  const table = plainTable(
    `→ read, ← returned${cut ? `; ${formatCount(cut)} more tensors are left out` : ""}`,
    [
      "tensor",
      "dtype, shape",
      "values",
      "not finite",
      "min",
      "max",
      "mean",
      "rms",
      "zeros",
      ...(hasReference ? ["distance to the reference"] : []),
    ],
    rows,
    new Set([4, 5, 6, 7, 8]),
  );
  const parts: HTMLElement[] = [scrolling(`Tensors of call ${call.number}`, table)];
  if (call.args) parts.push(h("p", { class: "args" }, `other arguments: ${call.args}`));
  return parts;
}

function reference(found: Reference): HTMLElement {
  const number = (cell: Cell): string => formatNumber(toNumber(cell));
  const error = toNumber(found.error);
  const allowed = toNumber(found.allowed);
  const limit =
    allowed > 0 ? `${formatTimes(error / allowed)} of the limit` : "equal to the bit is asked for";
  const differing = toNumber(found.differing);
  const parts = [
    `error ${number(found.error)} (${limit})`,
    `largest ${number(found.max_abs)}`,
    ...(Number.isNaN(toNumber(found.max_ulp)) ? [] : [`${number(found.max_ulp)} ulp`]),
    `cosine ${number(found.cosine)}`,
    `${formatCount(Number.isNaN(differing) ? 0 : differing)} elements differ`,
  ];
  return h("span", found.is_different ? { class: "tag" } : {}, parts.join(", "));
}

/** Bars in the colour of the text, of the finite values. */
function histogram(tensor: Tensor): Node {
  const { low, high, counts } = tensor.histogram!;
  const text =
    counts.length === 1
      ? `all are ${formatNumber(low)}`
      : `${formatNumber(low)} to ${formatNumber(high)}`;
  const made = document.createElementNS(SVG, "svg");
  const attributes: [string, string][] = [
    ["class", "histogram"],
    ["viewBox", `0 0 ${WIDTH} ${HEIGHT}`],
    ["width", String(WIDTH)],
    ["height", String(HEIGHT)],
    ["role", "img"],
    ["aria-label", `histogram of ${tensor.label || tensor.role}: ${text}`],
  ];
  for (const [name, value] of attributes) made.setAttribute(name, value);
  const most = Math.log1p(Math.max(...counts));
  const wide = WIDTH / Math.max(counts.length, 8);
  const path = counts
    .map((count, at) => {
      const tall = count ? Math.max((Math.log1p(count) / most) * (HEIGHT - 2), 1.5) : 0;
      return tall
        ? `M${at * wide} ${HEIGHT}v${-tall.toFixed(1)}h${(wide - 0.8).toFixed(2)}v${tall.toFixed(1)}z`
        : "";
    })
    .join("");
  const bars = document.createElementNS(SVG, "path");
  bars.setAttribute("d", path);
  made.append(bars);
  // Where 0 lies.
  if (low < 0 && high > 0) {
    const zero = document.createElementNS(SVG, "path");
    const x = ((WIDTH * -low) / (high - low)).toFixed(1);
    zero.setAttribute("d", `M${x} 0V${HEIGHT}`);
    zero.setAttribute("class", "zero");
    made.append(zero);
  }
  return h("div", {}, made, h("div", { class: "ends" }, text));
}
