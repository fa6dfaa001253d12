// Weights whose bytes never changed over the steps that the log holds.
import { h, plainTable, scrolling, section } from "./dom";
import { formatCount } from "./format";
import { range } from "./model";
import type { Store } from "./store";

const MOST = 200;

export function weights(store: Store): HTMLElement {
  const { model } = store;
  const compared = range(model.rowCount).filter(
    (row) => model.text("role", row) === "param" && model.number("compared", row) > 0,
  );
  const still = compared.filter((row) => model.number("changed", row) === 0);
  if (!compared.length) {
    const why = 'This log has no checksums of weights at two steps (record="full" has them).';
    return section("weights", "Weights that do not move", h("p", {}, why));
  }
  if (!still.length) {
    const text = `All ${formatCount(compared.length)} weights moved.`;
    return section("weights", "Weights that do not move", h("p", {}, text));
  }
  const rows = still.slice(0, MOST).map((row) => [
    h(
      "button",
      {
        type: "button",
        class: "link",
        onClick: () => store.open(row, model.number("last_step", row)),
      },
      model.text("name", row) + (model.hasSeveralRanks ? `, rank ${model.rank(row)}` : ""),
    ),
    formatCount(model.number("compared", row)),
    formatCount(model.number("numel", row)),
  ]);
  const hidden = still.length > rows.length ? `, the first ${rows.length} shown` : "";
  const caption =
    `${formatCount(still.length)} of ${formatCount(compared.length)} weights did not change${hidden}, ` +
    "including those that are frozen on purpose.";
  const table = plainTable(
    caption,
    ["weight", "readings compared", "elements"],
    rows,
    new Set([1, 2]),
  );
  table.id = "still";
  return section("weights", "Weights that do not move", scrolling("Weights", table));
}
