// The form that chooses which sites the heat map and the table show.
import { h, select } from "./dom";
import { formatCount } from "./format";
import { range } from "./model";
import { type Filter, groupOf, type Store } from "./store";

/** A form on the store's filter; all such forms show the same. */
export function filterForm(store: Store, id: string): HTMLElement {
  const { model } = store;
  const rows = range(model.rowCount);
  const distinct = (values: string[]): string[] => [...new Set(values)];
  const choices: [keyof Filter, string, string[]][] = [
    ["module", "Module", distinct(rows.map((row) => groupOf(model.module(row))))],
    [
      "role",
      "Role",
      distinct(rows.map((row) => `${model.text("direction", row)} ${model.text("role", row)}`)),
    ],
    ["verdict", "Verdict", distinct(model.verdicts)],
  ];
  if (model.hasSeveralRanks) choices.push(["rank", "Rank", model.ranks.map(String)]);
  const search = h("input", {
    type: "search",
    id: `${id}-search`,
    placeholder: "name, h.*.mlp",
    autocomplete: "off",
    spellcheck: "false",
    onInput: () => store.setFilter({ text: search.value }),
  });
  const fields = choices.map(([key, label, values]) =>
    select(
      label,
      [["", "all"], ...values.map((value): [string, string] => [value, value])],
      store.filter[key],
      (value) => store.setFilter({ [key]: value }),
    ),
  );
  const count = h("output", { for: search.id });
  const show = (): void => {
    if (search.value !== store.filter.text) search.value = store.filter.text;
    choices.forEach(([key], at) => {
      fields[at]!.querySelector("select")!.value = store.filter[key];
    });
    count.textContent = `${formatCount(store.rows.length)} of ${formatCount(model.rowCount)} sites`;
  };
  store.onFilter(show);
  show();
  return h(
    "form",
    { class: "filters", onSubmit: (event: Event) => event.preventDefault() },
    h("label", {}, h("span", {}, "Search"), search),
    ...fields,
    count,
  );
}
