// Files in which every parameter and member has a type: the data model of the pages. Their scripts share
// one scope, so all are read, and what is untyped in the others is left out.
import { spawnSync } from "node:child_process";

const TYPED = ["look", "file", "server", "state", "packed", "dom", "texts", "colour", "ramp"];

const { stdout, error } = spawnSync("npx", ["tsc", "-p", "pages.json", "--noImplicitAny"], { encoding: "utf8" });
if (error) throw error;
const found = stdout.split("\n").filter((line) => TYPED.some((name) => line.includes(`/viewer/page/${name}.js(`)));
console.error(found.join("\n"));
process.exit(found.length ? 1 : 0);
