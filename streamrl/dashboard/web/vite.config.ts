import { createHash } from "node:crypto";
import { readdirSync, readFileSync, writeFileSync } from "node:fs";
import { join, relative } from "node:path";
import { defineConfig, type Plugin } from "vite";

const ROOT = import.meta.dirname;
const OUT = join(ROOT, "..", "static");

/** Every file that the pages are built of; tests/dashboard/test_build.py reads the same list. */
function sources(): string[] {
  const below = (dir: string): string[] =>
    readdirSync(join(ROOT, dir), { withFileTypes: true }).flatMap((entry) =>
      entry.isDirectory() ? below(join(dir, entry.name)) : [join(dir, entry.name)],
    );
  const single = ["index.html", "package.json", "package-lock.json", "tsconfig.json", "vite.config.ts"];
  return [...single, ...below("src"), ...below("public")].map((path) => relative(ROOT, join(ROOT, path))).sort();
}

/** Writes of which sources this is the build, so that a test can tell without Node. */
function stamp(): Plugin {
  return {
    name: "stamp",
    closeBundle() {
      const hash = createHash("sha256");
      for (const path of sources()) {
        hash.update(path + "\0" + createHash("sha256").update(readFileSync(join(ROOT, path))).digest("hex") + "\n");
      }
      writeFileSync(join(OUT, "sources.sha256"), hash.digest("hex") + "\n");
    },
  };
}

export default defineConfig({
  plugins: [stamp()],
  oxc: { jsx: { runtime: "automatic", importSource: "preact" } },
  build: { outDir: OUT, emptyOutDir: true, assetsInlineLimit: 0, target: "es2022", modulePreload: { polyfill: false } },
});
