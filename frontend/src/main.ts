// Builds the page from its data, top to bottom.
import { runCells } from "./cells";
import { isDark } from "./colours";
import { comparisonParts } from "./comparison";
import { openContainer } from "./container";
import { detail } from "./detail";
import { h } from "./dom";
import { environment } from "./environment";
import { fleetParts } from "./fleet";
import { heatmap } from "./heatmap";
import { Model } from "./model";
import { rankMap } from "./rank_map";
import { ranks } from "./ranks";
import { sites } from "./sites";
import { spread } from "./spread";
import { steps } from "./steps";
import { Store } from "./store";
import { watched } from "./watched";
import { weights } from "./weights";

async function main(): Promise<void> {
  const app = document.getElementById("app")!;
  const text = (id: string): string => document.getElementById(id)?.textContent ?? "";
  const opened = await openContainer(text("header"), text("arrays"));
  const { kind } = opened.header as { kind?: string };
  if (kind === "fleet") {
    const fleet = fleetParts(opened);
    app.append(...fleet.parts);
    listenToTheme(() => fleet.themeChanged());
    document.documentElement.dataset.ready = "true";
    return;
  }
  if (kind === "proof") {
    listenToTheme(() => undefined); // its table is the page's text
    document.documentElement.dataset.ready = "true";
    return;
  }
  const model = new Model(opened);
  const store = new Store(model);
  const parts = model.header.comparison ? comparisonParts(store) : runParts(store);
  app.append(...parts.filter((part) => part !== null));
  const { first, opens = first } = model.header;
  if (opens && opens.row >= 0) store.choose(opens.row, opens.step);
  else if (!model.header.comparison) chooseTightest(store);
  listenToTheme(() => store.themeChanged());
  document.documentElement.dataset.ready = "true";
}

/** Of a run without anything unusual: the tensor that came nearest to the end of its dtype. */
function chooseTightest(store: Store): void {
  const { model } = store;
  const rooms = store.mapRows.map((row) => [model.headroom(row), row] as const);
  const known = rooms.filter(([bits]) => Number.isFinite(bits));
  if (!known.length) return;
  const [, row] = known.reduce((least, one) => (one[0] < least[0] ? one : least));
  store.choose(row, model.number("peak_step", row));
}

function runParts(store: Store): (HTMLElement | null)[] {
  if (!store.model.rowCount) return [environment(store)];
  return [
    heatmap(store, runCells(store.model)),
    detail(store),
    steps(store),
    watched(store),
    spread(store),
    sites(store),
    rankMap(store),
    ranks(store),
    weights(store),
    environment(store),
  ];
}

function listenToTheme(changed: () => void): void {
  const button = document.getElementById("theme") as HTMLButtonElement;
  const show = (): void => {
    button.textContent = isDark() ? "Light" : "Dark";
    button.setAttribute("aria-label", `Switch to ${isDark() ? "light" : "dark"} colours`);
  };
  button.addEventListener("click", () => {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    show();
    changed();
  });
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    show();
    changed();
  });
  show();
}

main().catch((error: unknown) => {
  const message = `This page could not be shown: ${error}`;
  document.getElementById("app")?.append(h("p", { role: "alert", class: "headline bad" }, message));
});
