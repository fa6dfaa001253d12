// Bundles the page's script and style into the Python package; with --check compares instead.
import { readFileSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

const here = dirname(fileURLToPath(import.meta.url));
const assets = join(here, "../python/fastcheck/report/page/assets");
const licence = readFileSync(join(here, "node_modules/uplot/LICENSE"), "utf8").trim();
const { version } = JSON.parse(readFileSync(join(here, "node_modules/uplot/package.json"), "utf8"));
const banner = `/* With uPlot ${version}, https://github.com/leeoniya/uPlot\n${licence}\n*/`;
// The page's script and style stand in the page itself: they must not end their elements.
const options = {
  bundle: true,
  minify: true,
  write: false,
  legalComments: "none",
  target: "es2022",
};
const built = [
  ["page.js", "src/main.ts", { format: "iife", banner: { js: banner } }],
  ["page.css", "src/style.css", {}],
];

let failed = false;
for (const [name, entry, more] of built) {
  const entryPoints = [join(here, entry)];
  const [file] = (await build({ ...options, ...more, entryPoints })).outputFiles;
  const text = file.text.trimEnd();
  if (/<\/(script|style)|<!--/i.test(text)) throw new Error(`${name} would end its element`);
  const place = join(assets, name);
  if (!process.argv.includes("--check")) {
    writeFileSync(place, text);
    console.log(`${name}: ${text.length} bytes`);
  } else if (readFileSync(place, "utf8") !== text) {
    console.error(`${name} is not that of the sources: run \`npm run build\` in frontend/`);
    failed = true;
  }
}
if (!process.argv.includes("--check")) writeFileSync(join(assets, "LICENSE-uPlot"), `${licence}\n`);
process.exit(failed ? 1 : 0);
