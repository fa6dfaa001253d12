// The legend of the heat map's colours.
import { css, type Mode, type Palette } from "./colours";
import { h } from "./dom";
import { MOST_BITS, MOST_DEVIATIONS, MOST_RATIO } from "./scores";

const ENDS: Record<Mode, [string, string]> = {
  headroom: [`${MOST_BITS} bits or more left`, "0 bits left"],
  unusual: [`${MOST_DEVIATIONS} deviations below`, `${MOST_DEVIATIONS} deviations above`],
  magnitude: ["small", "large"],
  difference: ["equal, or a thousandth of the limit", "a thousand times the limit"],
  ratio: [`1/${2 ** MOST_RATIO} of the reference`, `${2 ** MOST_RATIO} times it`],
};

const NOT_FINITE = "NaN or Inf on one side";

export function legend(mode: Mode, { ramp, bad }: Palette, isWatched: boolean): HTMLElement[] {
  const [left, right] = ENDS[mode];
  const bar = h("canvas", { width: 128, height: 12, "aria-hidden": "true" });
  const context = bar.getContext("2d")!;
  ramp.forEach((colour, at) => {
    context.fillStyle = css(colour);
    context.fillRect(at / 2, 0, 1, 12);
  });
  const square = h("span", { class: "square", "aria-hidden": "true" });
  square.style.background = css(bad);
  const diamond = h("span", { class: "diamond", "aria-hidden": "true" });
  return [
    h("span", {}, left),
    bar,
    h("span", {}, right),
    h("span", { class: "pair" }, square, mode === "difference" ? NOT_FINITE : "NaN or Inf"),
    ...(isWatched ? [h("span", { class: "pair" }, diamond, "unusual (watch)")] : []),
  ];
}
