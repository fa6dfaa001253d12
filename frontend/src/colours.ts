// The colours of the heat map, for a light and a dark page.

type Colour = [number, number, number];

/** What the colour of a cell stands for. */
export type Mode =
  "headroom" | "unusual" | "magnitude" | "difference" | "ratio" | "ranks" | "outlying";

/** Whether its scores go from -1 to 1, and not from 0. */
export function isDiverging(mode: Mode): boolean {
  return mode === "unusual" || mode === "ratio" || mode === "ranks";
}

export interface Palette {
  /** 256 colours; for "unusual" from far below to far above. */
  ramp: Colour[];
  bad: Colour;
  /** Of bits that replicas do not have. */
  differs: Colour;
  none: Colour;
  text: string;
  faint: string;
  accent: string;
  mark: string;
}

const LIGHT = {
  // From much room to none; the darkest is next to the limit.
  headroom: ["#eef3f8", "#cfe0ee", "#a6c8dc", "#f3c77b", "#e08a2e", "#a3370f"],
  unusual: ["#123f73", "#4a86b8", "#b5d0e3", "#f4f4f2", "#f2c9a0", "#d07a2d", "#84320a"],
  // Below the limit, at it, above it.
  difference: ["#f1f4f7", "#cddfea", "#9dbfd6", "#f6d08a", "#dd8330", "#8f2f0c"],
  ratio: ["#123f73", "#4a86b8", "#b5d0e3", "#f4f4f2", "#f2c9a0", "#d07a2d", "#84320a"],
  magnitude: ["#f2f5ee", "#c9dfc0", "#86bd9f", "#3f8f8c", "#205f78", "#12304f"],
  ranks: ["#123f73", "#4a86b8", "#b5d0e3", "#f4f4f2", "#f2c9a0", "#d07a2d", "#84320a"],
  // Of an ordinary rank, then from the limit on.
  outlying: ["#d3dde7", "#f3c77b", "#e08a2e", "#a3370f"],
  bad: "#c4007a",
  differs: "#1d4fd8",
  none: "#ffffff",
};
const DARK = {
  headroom: ["#18222d", "#22405a", "#346a8a", "#9a7a35", "#dd9233", "#ffd27a"],
  unusual: ["#9fd0f5", "#4d8fc4", "#22405a", "#1a1f26", "#573a1c", "#c9792c", "#ffc98f"],
  difference: ["#161c23", "#1f3447", "#2f5672", "#94702e", "#dd9233", "#ffd9a0"],
  ratio: ["#9fd0f5", "#4d8fc4", "#22405a", "#1a1f26", "#573a1c", "#c9792c", "#ffc98f"],
  magnitude: ["#161d22", "#1c3f46", "#22666a", "#3f9a83", "#8fcb93", "#e3f3c0"],
  ranks: ["#9fd0f5", "#4d8fc4", "#22405a", "#1a1f26", "#573a1c", "#c9792c", "#ffc98f"],
  outlying: ["#25313e", "#9a7a35", "#dd9233", "#ffd27a"],
  bad: "#ff3fae",
  differs: "#5b9bff",
  none: "#0d1117",
};

export function isDark(): boolean {
  const asked = document.documentElement.dataset.theme;
  if (asked) return asked === "dark";
  return window.matchMedia("(prefers-color-scheme: dark)").matches;
}

export function palette(mode: Mode): Palette {
  const colours = isDark() ? DARK : LIGHT;
  const style = getComputedStyle(document.documentElement);
  return {
    ramp: ramp(colours[mode].map(parse)),
    bad: parse(colours.bad),
    differs: parse(colours.differs),
    none: parse(colours.none),
    text: style.getPropertyValue("--text").trim(),
    faint: style.getPropertyValue("--faint").trim(),
    accent: style.getPropertyValue("--accent").trim(),
    mark: style.getPropertyValue("--bad").trim(),
  };
}

export function css([red, green, blue]: Colour): string {
  return `rgb(${red}, ${green}, ${blue})`;
}

function parse(hex: string): Colour {
  const value = Number.parseInt(hex.slice(1), 16);
  return [value >> 16, (value >> 8) & 255, value & 255];
}

function ramp(stops: Colour[]): Colour[] {
  return Array.from({ length: 256 }, (_, index) => {
    const at = (index / 255) * (stops.length - 1);
    const left = Math.min(Math.floor(at), stops.length - 2);
    const mix = (part: number): number =>
      Math.round(
        stops[left]![part]! + (stops[left + 1]![part]! - stops[left]![part]!) * (at - left),
      );
    return [mix(0), mix(1), mix(2)];
  });
}
