// The specs of configs/, which the build takes into the page as text. Those of the chaos campaign are no beginning of a job.
import { parseTOML, getStaticTOMLValue } from "toml-eslint-parser";

export interface Template {
  /** The name of its file, without `.toml`. */
  id: string;
  /** The job's name in it. */
  title: string;
  text: string;
}

const FIRST = "demo";
const FILES = import.meta.glob<string>(["../../../configs/*.toml", "!../../../configs/chaos*.toml"], { query: "?raw", import: "default", eager: true });

export const TEMPLATES: readonly Template[] = Object.entries(FILES)
  .map(([path, text]) => {
    const id = path.replace(/^.*\//, "").replace(/\.toml$/, "");
    return { id, title: String(getStaticTOMLValue(parseTOML(text)).name), text };
  })
  .sort((left, right) => Number(right.id === FIRST) - Number(left.id === FIRST) || left.id.localeCompare(right.id));

/** The demo's, which runs on a stack as it is installed. */
export const START = TEMPLATES[0] as Template;
