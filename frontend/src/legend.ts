// The legend of the heat map's colours.
import { css, type Mode, type Palette } from "./colours";
import { h } from "./dom";
import { MOST_BITS, MOST_DEVIATIONS, MOST_OUTLYING, MOST_RATIO } from "./scores";

const ENDS: Record<Mode, [string, string]> = {
  headroom: [`${MOST_BITS} bits or more left`, "0 bits left"],
  unusual: [`${MOST_DEVIATIONS} deviations below`, `${MOST_DEVIATIONS} deviations above`],
  magnitude: ["small", "large"],
  difference: ["equal, or a thousandth of the limit", "a thousand times the limit"],
  ratio: [`1/${2 ** MOST_RATIO} of the reference`, `${2 ** MOST_RATIO} times it`],
  ranks: [`1/${2 ** MOST_RATIO} of the median of the ranks`, `${2 ** MOST_RATIO} times it`],
  outlying: ["like its peers", `${MOST_OUTLYING} robust standard deviations or more`],
};

const NOT_FINITE = "NaN or Inf on one side";

export function legend(
  mode: Mode,
  { ramp, bad, differs, none }: Palette,
  isWatched: boolean,
): HTMLElement[] {
  const [left, right] = ENDS[mode];
  const bar = h("canvas", { width: 128, height: 12, "aria-hidden": "true" });
  const context = bar.getContext("2d")!;
  ramp.forEach((colour, at) => {
    context.fillStyle = css(colour);
    context.fillRect(at / 2, 0, 1, 12);
  });
  const diamond = h("span", { class: "diamond", "aria-hidden": "true" });
  return [
    h("span", {}, left),
    bar,
    h("span", {}, right),
    pair(bad, mode === "difference" ? NOT_FINITE : "NaN or Inf"),
    ...(mode === "outlying"
      ? [pair(differs, "differs from the replicas"), pair(none, "no record")]
      : []),
    ...(isWatched ? [h("span", { class: "pair" }, diamond, "unusual (watch)")] : []),
  ];
}

function pair(colour: Palette["bad"], text: string): HTMLElement {
  const square = h("span", { class: "square", "aria-hidden": "true" });
  square.style.background = css(colour);
  return h("span", { class: "pair" }, square, text);
}
