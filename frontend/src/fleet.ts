// The page of a fleet: ranks by steps, the chosen rank, and a table of the ranks that stand out.
import type { Opened, Plane } from "./container";
import { h, plainTable, scrolling, section, select } from "./dom";
import { formatCount, matcher } from "./format";
import { matrixSection } from "./heatmap";
import { type Lines, Matrix } from "./matrix";
import { range } from "./model";
import { DIFFERS, MOST_OUTLYING, NOT_FINITE } from "./scores";

interface Finding {
  kind: string;
  accuses: boolean;
  what: string;
  advice: string;
  step: number;
  /** Rank, first step, site, evidence. */
  suspects: [number, number, string, string][];
}

type Text = "host" | "device" | "serial" | "replica_group";
type Count = "rank" | "first_step" | "last_step" | "row_count";

export interface FleetHeader {
  kind: "fleet";
  ranks: Record<Text, (string | null)[]> & Record<Count, number[]>;
  axis: { width: number; starts: number[] };
  findings: Finding[];
}

/** See python/fastcheck/fleet/page.py for the codes. */
const CODE = { none: 0, ordinary: 1, least: 2, most: 250, replicas: 254, nonfinite: 255 } as const;
const MOST_ROWS = 60;
/** Of the colour of an outlier of a rank that no finding names: among many ranks chance makes some. */
const PALE = 0.3;

export function fleetParts(opened: Opened): { parts: HTMLElement[]; themeChanged: () => void } {
  const fleet = new Fleet(opened);
  return { parts: fleet.parts(), themeChanged: () => fleet.themeChanged() };
}

class Fleet {
  readonly #header: FleetHeader;
  readonly #state: Plane;
  readonly #sites: Plane;
  readonly #lines: number[];
  readonly #columns: number;
  readonly #lineOf: Map<number, number>;
  readonly #findingsOf = new Map<number, Finding[]>();
  /** By line: the largest code, and how many cells are not ordinary. */
  readonly #worst: number[];
  readonly #unusual: number[];
  #themeListener = (): void => {};
  #shown: number[];
  #chosen: { row: number; column: number } | null = null;

  constructor({ header, planes }: Opened) {
    this.#header = header as FleetHeader;
    this.#state = planes.get("state")!;
    this.#sites = planes.get("sites")!;
    const { ranks, axis, findings } = this.#header;
    this.#columns = axis.starts.length;
    this.#lines = range(ranks.rank.length);
    this.#shown = this.#lines;
    this.#lineOf = new Map(ranks.rank.map((rank, line) => [rank, line]));
    for (const finding of findings) {
      for (const [rank] of finding.suspects) {
        const line = this.#lineOf.get(rank);
        if (line === undefined) continue;
        const mine = this.#findingsOf.get(line);
        if (!mine) this.#findingsOf.set(line, [finding]);
        else if (!mine.includes(finding)) mine.push(finding);
      }
    }
    const columns = range(this.#columns);
    const codes = (line: number): number[] => columns.map((at) => this.#state.at(line, at));
    this.#worst = this.#lines.map((line) => Math.max(0, ...codes(line)));
    this.#unusual = this.#lines.map(
      (line) => codes(line).filter((code) => code > CODE.ordinary).length,
    );
    const first = findings.find((finding) => finding.accuses) ?? findings[0];
    const suspect = first?.suspects[0];
    const line = suspect && this.#lineOf.get(suspect[0]);
    if (suspect && line !== undefined) {
      this.#chosen = { row: line, column: this.#column(suspect[1]) };
    }
  }

  parts(): HTMLElement[] {
    const { starts } = this.#header.axis;
    const detail = h("div", { id: "rank-detail" });
    const lines: Lines = {
      id: "fleet-map",
      label: "Heat map of ranks by steps",
      starts,
      rows: () => this.#shown,
      scores: () => this.#scores(),
      name: (line, room) => this.#name(line, room),
      describe: (line, column) => this.#describe(line, column),
      choose: (line, column) => {
        this.#chosen = { row: line, column };
        show();
      },
      chosen: () => this.#chosen,
      first: this.#chosen && this.#chosen.column,
      marked: this.#accused(),
    };
    const matrix = new Matrix(lines, "outlying");
    const show = (): void => {
      detail.replaceChildren(...this.#detail());
      matrix.draw();
    };
    detail.append(...this.#detail());
    const theme = { onTheme: (listener: () => void) => (this.#themeListener = listener) };
    const choose = (line: number): void => {
      this.#chosen = { row: line, column: this.#firstUnusual(line) };
      show();
    };
    return [
      matrixSection(theme, "fleet-map", "Ranks by steps", matrix, {
        modes: [["outlying", "outliers"]],
        hint:
          "A column is one step or several. Click a cell, or move with the arrow keys and press Enter, to " +
          "show the rank. Suspects have coloured names. Outliers of ranks that no finding names are pale: " +
          "among many ranks some occur by chance.",
        isWatched: false,
        filter: this.#filter(() => matrix.rowsChanged()),
      }),
      section("rank", "Rank", detail),
      this.#table(choose),
    ];
  }

  themeChanged(): void {
    this.#themeListener();
  }

  #accused(): Set<number> {
    const accused = [...this.#findingsOf].filter(([, found]) => found.some((one) => one.accuses));
    return new Set(accused.map(([line]) => line));
  }

  #scores(): Float32Array {
    const made = new Float32Array(this.#lines.length * this.#columns);
    // A limit of the peers is at least 6, which is apart from the ordinary at once.
    for (const line of this.#lines) {
      const isNamed = this.#findingsOf.has(line);
      for (let column = 0; column < this.#columns; column++) {
        const score = scoreOf(this.#state.at(line, column));
        made[line * this.#columns + column] = isNamed || score > 1 ? score : score * PALE;
      }
    }
    return made;
  }

  #column(step: number): number {
    const { starts } = this.#header.axis;
    const behind = starts.findIndex((start) => start > step);
    return Math.max((behind < 0 ? starts.length : behind) - 1, 0);
  }

  #firstUnusual(line: number): number {
    const [finding] = this.#findingsOf.get(line) ?? [];
    const suspect = finding?.suspects.find(([rank]) => this.#lineOf.get(rank) === line);
    if (suspect) return this.#column(suspect[1]);
    const found = range(this.#columns).find((at) => this.#state.at(line, at) > CODE.ordinary);
    return found ?? 0;
  }

  #name(line: number, room: number): string {
    const { rank, host } = this.#header.ranks;
    const short = `rank ${rank[line]}`;
    const whole = host[line] === null ? short : `${short} · ${host[line]}`;
    return whole.length <= room ? whole : short;
  }

  #text(kind: Text, line: number): string {
    return this.#header.ranks[kind][line] ?? "unknown";
  }

  #describe(line: number, column: number): string {
    const { starts, width } = this.#header.axis;
    const step = starts[column] ?? 0;
    const steps = width > 1 && this.#columns > 1 ? `from step ${step}` : `step ${step}`;
    const code = this.#state.at(line, column);
    const at = this.#sites.at(line, column);
    const places = at ? ` at ${at === 255 ? "255 or more" : at} site${at > 1 ? "s" : ""}` : "";
    return `${this.#name(line, 80)}, ${steps}: ${stateText(code)}${places}`;
  }

  #detail(): HTMLElement[] {
    if (!this.#chosen) return [h("p", { class: "hint" }, "No rank is chosen.")];
    const line = this.#chosen.row;
    const { ranks } = this.#header;
    const facts: [string, string][] = [
      ["host", this.#text("host", line)],
      ["device", this.#text("device", line)],
      ["serial", this.#text("serial", line)],
      ["replica group", this.#text("replica_group", line)],
      [
        "steps",
        `${formatCount(ranks.first_step[line]!)} to ${formatCount(ranks.last_step[line]!)}`,
      ],
      ["records", formatCount(ranks.row_count[line]!)],
      ["unusual columns of the map", formatCount(this.#unusual[line]!)],
    ];
    const items = facts.map(([name, text]) => h("div", {}, h("dt", {}, name), h("dd", {}, text)));
    const found = this.#findingsOf.get(line) ?? [];
    const told = found.flatMap((finding) =>
      finding.suspects
        .filter(([rank]) => this.#lineOf.get(rank) === line)
        .map(([, step, site, evidence]) =>
          h(
            "li",
            {},
            h("strong", finding.accuses ? { class: "bad" } : {}, finding.what),
            `: from step ${formatCount(step)}, at ${site}. ${evidence}. `,
            h("em", {}, `Try: ${finding.advice}`),
          ),
        ),
    );
    return [
      h("h3", { id: "rank-name" }, this.#name(line, 80)),
      h("dl", { class: "facts" }, ...items),
      told.length ? h("ul", {}, ...told) : h("p", {}, "No finding names this rank."),
    ];
  }

  #filter(changed: () => void): HTMLElement {
    const search = h("input", {
      type: "search",
      id: "fleet-search",
      placeholder: "rank, host, serial",
      autocomplete: "off",
      spellcheck: "false",
      onInput: () => show(),
    });
    let kind = "";
    const count = h("output", { for: search.id });
    const show = (): void => {
      const words = search.value.split(/\s+/).filter(Boolean);
      this.#shown = this.#lines.filter((line) => {
        if (kind === "named" && !this.#findingsOf.has(line)) return false;
        if (kind === "unusual" && this.#worst[line]! <= CODE.ordinary) return false;
        if (kind === "hosts" && !this.#hosts().has(this.#text("host", line))) return false;
        return words.every((word) => this.#matches(line, word));
      });
      count.textContent = `${formatCount(this.#shown.length)} of ${formatCount(this.#lines.length)} ranks`;
      changed();
    };
    const kinds = select(
      "Show",
      [
        ["", "all ranks"],
        ["named", "ranks that a finding names"],
        ["hosts", "the hosts of these ranks"],
        ["unusual", "ranks with an unusual step"],
      ],
      "",
      (value) => {
        kind = value;
        show();
      },
    );
    count.textContent = `${formatCount(this.#lines.length)} of ${formatCount(this.#lines.length)} ranks`;
    return h(
      "form",
      { class: "filters", onSubmit: (event: Event) => event.preventDefault() },
      h("label", {}, h("span", {}, "Search"), search),
      kinds,
      count,
    );
  }

  /** A number is a rank in full; other words are parts of a name. */
  #matches(line: number, word: string): boolean {
    if (/^\d+$/.test(word) && String(this.#header.ranks.rank[line]) === word) return true;
    const kinds: Text[] = ["host", "device", "serial", "replica_group"];
    return kinds.some((kind) => matcher(word)(this.#text(kind, line)));
  }

  #hosts(): Set<string> {
    return new Set([...this.#findingsOf.keys()].map((line) => this.#text("host", line)));
  }

  #table(choose: (line: number) => void): HTMLElement {
    const named = (line: number): number => {
      const found = this.#findingsOf.get(line) ?? [];
      return found.some((one) => one.accuses) ? 2 : Number(found.length > 0);
    };
    const ordered = this.#lines
      .filter((line) => named(line) || this.#unusual[line])
      .sort(
        (one, other) =>
          named(other) - named(one) ||
          this.#unusual[other]! - this.#unusual[one]! ||
          this.#worst[other]! - this.#worst[one]!,
      );
    const rows = ordered
      .slice(0, MOST_ROWS)
      .map((line) => [
        h(
          "button",
          { type: "button", class: "link", onClick: () => choose(line) },
          String(this.#header.ranks.rank[line]),
        ),
        this.#text("host", line),
        this.#text("device", line),
        this.#text("serial", line),
        this.#text("replica_group", line),
        formatCount(this.#unusual[line]!),
        stateText(this.#worst[line]!),
        (this.#findingsOf.get(line) ?? []).map((one) => one.kind).join(", ") || "–",
      ]);
    const left = ordered.length - rows.length;
    const more = left > 0 ? ` ${formatCount(left)} more ranks are not shown.` : "";
    const table = plainTable(
      `Ranks that a finding names, then those that are unusual in most columns of the map.${more}`,
      ["rank", "host", "device", "serial", "replica group", "columns", "at most", "findings"],
      rows,
      new Set([0, 5]),
    );
    table.id = "fleet-table";
    return section("fleet-ranks", "Unusual ranks", scrolling("Table of ranks", table));
  }
}

function deviations(code: number): number {
  return 4 * 2 ** ((code - CODE.least) / 16);
}

/** 0 for an ordinary cell, and at least 0.3 for an outlier. */
function scoreOf(code: number): number {
  if (code === CODE.none) return Number.NaN;
  if (code === CODE.nonfinite) return NOT_FINITE;
  if (code === CODE.replicas) return DIFFERS;
  if (code === CODE.ordinary) return 0;
  const share = Math.log(deviations(code) / 4) / Math.log(MOST_OUTLYING / 4);
  return Math.min(0.3 + 0.7 * Math.max(share, 0), 1);
}

function stateText(code: number): string {
  if (code === CODE.none) return "no record";
  if (code === CODE.nonfinite) return "NaN or infinity";
  if (code === CODE.replicas) return "differs from the replicas";
  if (code === CODE.ordinary) return "like its peers";
  const least = code === CODE.most ? "more than" : "about";
  const found = deviations(code);
  return `${least} ${found < 100 ? found.toPrecision(2) : formatCount(Math.round(found))} robust standard deviations`;
}
