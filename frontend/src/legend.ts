// The legend of the heat map's colours.
import { css, type Mode, type Palette } from "./colours";
import { h } from "./dom";
import { MOST_BITS, MOST_DEVIATIONS } from "./scores";

const ENDS: Record<Mode, [string, string]> = {
  headroom: [`${MOST_BITS} bits or more left`, "0 bits left"],
  unusual: [`${MOST_DEVIATIONS} deviations below`, `${MOST_DEVIATIONS} deviations above`],
  magnitude: ["small", "large"],
};

export function legend(mode: Mode, { ramp, bad }: Palette): HTMLElement[] {
  const [left, right] = ENDS[mode];
  const bar = h("canvas", { width: 128, height: 12, "aria-hidden": "true" });
  const context = bar.getContext("2d")!;
  ramp.forEach((colour, at) => {
    context.fillStyle = css(colour);
    context.fillRect(at / 2, 0, 1, 12);
  });
  const square = h("span", { class: "square", "aria-hidden": "true" });
  square.style.background = css(bad);
  return [
    h("span", {}, left),
    bar,
    h("span", {}, right),
    h("span", { class: "pair" }, square, "NaN or Inf"),
  ];
}
