// Builds page/ into gateway/page/static/, which the wheel and the image carry.
import { createHash } from "node:crypto";
import { readdirSync, readFileSync, statSync, writeFileSync } from "node:fs";
import { join, relative } from "node:path";
import { fileURLToPath } from "node:url";
import { defineConfig, type Plugin } from "vite";

const here = fileURLToPath(new URL(".", import.meta.url));
const out = join(here, "..", "gateway", "page", "static");
/** Types are erased, and a test compares them with the records. */
const ERASED = "src/types.ts";
const SOURCES = ["index.html", "package.json", "package-lock.json", "tsconfig.json", "vite.config.ts", "src"];
/** Specs that a new job can begin with: `src/submit/templates.ts` takes their text into the page. */
const TEMPLATES = join(here, "..", "configs");

/** Lists the files of a folder of the page, or the file itself. */
function sources(name: string): string[] {
  const path = join(here, name);
  if (!statSync(path).isDirectory()) return [path];
  return readdirSync(path).flatMap((inner) => sources(join(name, inner)));
}

function templates(): string[] {
  return readdirSync(TEMPLATES)
    .filter((name) => name.endsWith(".toml"))
    .map((name) => join(TEMPLATES, name));
}

/** Records the digest of the sources that the build was made of; tests/unit/gateway/page/test_files.py computes it too. */
function recordSources(): Plugin {
  return {
    name: "record-sources",
    apply: "build",
    closeBundle() {
      const digest = createHash("sha256");
      const files = [...SOURCES.flatMap(sources), ...templates()].map((path) => [relative(here, path).replaceAll("\\", "/"), path] as const);
      const built = files.filter(([name]) => name !== ERASED);
      for (const [name, path] of built.sort(([a], [b]) => (a < b ? -1 : 1))) {
        const content = readFileSync(path);
        digest.update(`${name} ${content.length}\n`).update(content);
      }
      writeFileSync(join(out, "sources.json"), JSON.stringify({ sha256: digest.digest("hex") }) + "\n");
    },
  };
}

export default defineConfig({
  plugins: [recordSources()],
  oxc: { jsx: { runtime: "automatic", importSource: "preact" } },
  build: {
    outDir: out,
    emptyOutDir: true,
    assetsInlineLimit: 0, // the page's policy allows no data: address
    modulePreload: { polyfill: false },
    target: "es2022",
    reportCompressedSize: false,
  },
  server: {
    fs: { allow: [here, TEMPLATES] },
    proxy: { "/v1": "http://127.0.0.1:8000", "/openapi.json": "http://127.0.0.1:8000" },
  },
});
