// Numbers as text.

/** At most ten characters, with enough digits to see a trend. */
export function formatNumber(value: number): string {
  if (Number.isNaN(value)) return "–";
  if (!Number.isFinite(value)) return value > 0 ? "inf" : "-inf";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e7 || size < 1e-3) return value.toExponential(2);
  if (Number.isInteger(value) || size >= 1000) return Math.round(value).toLocaleString("en-US");
  return String(Number(value.toPrecision(4)));
}

export function formatCount(value: number): string {
  return value.toLocaleString("en-US");
}

export function formatShare(share: number): string {
  if (Number.isNaN(share)) return "–";
  if (share > 0 && share < 1e-4) return "<0.01 %";
  return `${(100 * share).toFixed(share === 0 || share === 1 ? 0 : 2)} %`;
}

export function formatBits(bits: number): string {
  return Number.isNaN(bits) ? "–" : `${Math.max(bits, 0).toFixed(1)} bits`;
}

export function formatCounts([nan, posinf, neginf]: [number, number, number]): string {
  const parts = [
    [nan, "NaN"],
    [posinf, "+Inf"],
    [neginf, "-Inf"],
  ] as const;
  return parts
    .filter(([count]) => count)
    .map(([count, name]) => `${formatCount(count)} ${name}`)
    .join(", ");
}

/** `text` in at most `room` characters, without its beginning where it is longer. */
export function tailOf(text: string, room: number): string {
  return text.length <= room ? text : `…${text.slice(text.length - Math.max(room - 1, 1))}`;
}

/**
 * The same of a path: whole parts of it, where the last of them has room. The last number among the
 * parts that are left out stays, as it tells one block from the next: "0…fc1" for "h.0.mlp.fc1".
 */
export function tailOfPath(path: string, room: number): string {
  if (path.length <= room) return path;
  const parts = path.split(".");
  let number = "";
  while (parts.length > 1 || (number && parts.length)) {
    const tail = parts.join(".");
    if (number.length + tail.length < room) return `${number}…${tail}`;
    const left = parts.shift()!;
    if (/^\d+$/.test(left)) number = left;
  }
  return number.length + 3 < room
    ? number + tailOf(path, room - number.length)
    : tailOf(path, room);
}

/** Whether a text holds all words of a search, in any case; a `*` in a word is any part of a name. */
export function matcher(search: string): (text: string) => boolean {
  const words = search.split(/\s+/).filter(Boolean);
  const patterns = words.map((word) => {
    const parts = word.split("*").map((part) => part.replace(/[\\^$.|?+()[\]{}]/g, "\\$&"));
    return new RegExp(parts.join("\\S*"), "i");
  });
  return (text) => patterns.every((pattern) => pattern.test(text));
}
