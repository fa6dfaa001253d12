// Makes elements. Text from a log only ever becomes text: there is no way to pass markup.

type Child = Node | string | number | null;

/** An element with attributes and children; `onX` attributes are listeners. */
export function h<Name extends keyof HTMLElementTagNameMap>(
  name: Name,
  attributes: Record<string, string | number | boolean | EventListener | null> = {},
  ...children: Child[]
): HTMLElementTagNameMap[Name] {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === false) continue;
    if (typeof value === "function") element.addEventListener(key.slice(2).toLowerCase(), value);
    else element.setAttribute(key, value === true ? "" : String(value));
  }
  for (const child of children) {
    if (child !== null) element.append(child instanceof Node ? child : String(child));
  }
  return element;
}

/** A section of the page with its heading. */
export function section(id: string, title: string, ...children: Child[]): HTMLElement {
  const heading = h("h2", { id: `${id}-title` }, title);
  return h("section", { id, "aria-labelledby": `${id}-title` }, heading, ...children);
}

/** A place that scrolls sideways by itself, by keyboard too. */
export function scrolling(label: string, ...children: Child[]): HTMLElement {
  return h(
    "div",
    { class: "scrolling", tabindex: 0, role: "region", "aria-label": label },
    ...children,
  );
}

/** A table of text; cells of `numeric` columns are set to the right. */
export function plainTable(
  caption: string,
  header: string[],
  rows: Child[][],
  numeric: Set<number> = new Set(),
): HTMLTableElement {
  const align = (index: number) => (numeric.has(index) ? { class: "number" } : {});
  return h(
    "table",
    {},
    h("caption", {}, h("span", {}, caption)),
    h(
      "thead",
      {},
      h("tr", {}, ...header.map((text, at) => h("th", { scope: "col", ...align(at) }, text))),
    ),
    h(
      "tbody",
      {},
      ...rows.map((cells) => h("tr", {}, ...cells.map((cell, at) => h("td", align(at), cell)))),
    ),
  );
}

/** A labelled choice. */
export function select(
  label: string,
  options: [string, string][],
  value: string,
  onChange: (value: string) => void,
): HTMLLabelElement {
  const input = h(
    "select",
    { onChange: () => onChange(input.value) },
    ...options.map(([key, text]) => h("option", { value: key, selected: key === value }, text)),
  );
  return h("label", {}, h("span", {}, label), input);
}
