// Opens the data of the page: see python/fastcheck/report/page/container.py for the kinds of arrays.

interface Place {
  kind: "f64" | "log" | "linear" | "u8";
  rows: number;
  columns: number;
  offset: number;
  bytes: number;
  per_octave?: number;
  has_missing?: boolean;
  low?: number[];
  high?: number[];
  levels?: number;
}

/** A table of numbers, NaN where a value is missing. */
export interface Plane {
  rows: number;
  columns: number;
  at(row: number, column: number): number;
}

export interface Opened {
  header: unknown;
  planes: Map<string, Plane>;
}

const ZERO = -32767;

/** Decodes the two scripts that hold the data. */
export async function openContainer(headerText: string, arraysText: string): Promise<Opened> {
  const [text, data] = await Promise.all([inflate(headerText), inflate(arraysText)]);
  const header = JSON.parse(new TextDecoder().decode(text)) as { arrays: Record<string, Place> };
  const planes = new Map<string, Plane>();
  for (const [name, place] of Object.entries(header.arrays)) {
    planes.set(name, decode(data.subarray(place.offset, place.offset + place.bytes), place));
  }
  return { header, planes };
}

async function inflate(base64: string): Promise<Uint8Array> {
  const binary = atob(base64.trim());
  const bytes = new Uint8Array(binary.length);
  for (let at = 0; at < binary.length; at++) bytes[at] = binary.charCodeAt(at);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

function decode(data: Uint8Array, place: Place): Plane {
  if (place.kind === "f64") return exact(data, place);
  if (place.kind === "log") return logarithmic(data, place);
  if (place.kind === "linear") return linear(data, place);
  const { rows, columns } = place;
  return { rows, columns, at: (row, column) => data[row * columns + column]! };
}

function exact(data: Uint8Array, { rows, columns }: Place): Plane {
  const cells = rows * columns;
  const bytes = new Uint8Array(cells * 8);
  for (let plane = 0; plane < 8; plane++) {
    for (let cell = 0; cell < cells; cell++) bytes[cell * 8 + plane] = data[plane * cells + cell]!;
  }
  const words = new Uint32Array(bytes.buffer);
  for (let row = 0; row < rows; row++) {
    const start = row * columns * 2;
    for (let at = start + 2; at < start + columns * 2; at++) {
      words[at] = words[at]! ^ words[at - 2]!;
    }
  }
  const values = new Float64Array(bytes.buffer);
  return { rows, columns, at: (row, column) => values[row * columns + column]! };
}

function logarithmic(data: Uint8Array, place: Place): Plane {
  const { rows, columns } = place;
  const cells = rows * columns;
  const codes = new Int16Array(cells);
  for (let row = 0; row < rows; row++) {
    let code = 0;
    for (let cell = row * columns; cell < (row + 1) * columns; cell++) {
      const zigzag = data[cell]! | (data[cells + cell]! << 8);
      code = ((code + ((zigzag >> 1) ^ -(zigzag & 1))) << 16) >> 16;
      codes[cell] = code;
    }
  }
  const missing = place.has_missing ? data.subarray(2 * cells) : null;
  const scale = 1 / (place.per_octave ?? 1);
  const at = (row: number, column: number): number => {
    const cell = row * columns + column;
    if (missing !== null && (missing[cell >> 3]! >> (7 - (cell & 7))) & 1) return Number.NaN;
    const code = codes[cell]!;
    return code === ZERO ? 0 : 2 ** (code * scale);
  };
  return { rows, columns, at };
}

function linear(data: Uint8Array, place: Place): Plane {
  const { rows, columns } = place;
  const low = place.low ?? [];
  const high = place.high ?? [];
  const levels = place.levels ?? 254;
  const at = (row: number, column: number): number => {
    const code = data[row * columns + column]!;
    if (code === 255) return Number.NaN;
    return low[row]! + ((high[row]! - low[row]!) * code) / levels;
  };
  return { rows, columns, at };
}

/** Whether a bit is set, of bits as numpy.packbits has them in the one row of a plane. */
export function bitOf(plane: Plane, index: number): boolean {
  return ((plane.at(0, index >> 3) >> (7 - (index & 7))) & 1) === 1;
}
