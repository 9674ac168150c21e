// What a lane's spans are, each told apart by colour, by pattern and by a word.
//
// The colours are those of Okabe and Ito, which people with any colour vision can tell apart; two kinds of nearly the
// same lightness have different patterns, so that the lanes can be read without colours, too.

export type Pattern = "plain" | "rising" | "falling" | "dots" | "crossed" | "upright" | "level";

export interface Kind {
  what: string;
  /** What the process does meanwhile. */
  says: string;
  color: string;
  pattern: Pattern;
  /** True for time in which the process has nothing to do. */
  idle: boolean;
}

export const KINDS: readonly Kind[] = [
  { what: "generate", says: "samples completions", color: "#0072b2", pattern: "plain", idle: false },
  { what: "score", says: "waits for the rewards", color: "#56b4e9", pattern: "dots", idle: false },
  { what: "load", says: "takes a version into its engine", color: "#cc79a7", pattern: "rising", idle: false },
  { what: "train", says: "passes forward and backward", color: "#d55e00", pattern: "plain", idle: false },
  { what: "step", says: "takes the optimizer's step", color: "#e69f00", pattern: "falling", idle: false },
  { what: "publish", says: "publishes a batch", color: "#009e73", pattern: "upright", idle: false },
  { what: "sync", says: "announces the version that the step made", color: "#009e73", pattern: "level", idle: false },
  { what: "open", says: "commits an iteration and opens the next", color: "#5f6f7a", pattern: "level", idle: false },
  { what: "checkpoint", says: "saves a checkpoint", color: "#f0e442", pattern: "rising", idle: false },
  { what: "compute", says: "computes a stage's columns", color: "#0072b2", pattern: "crossed", idle: false },
  { what: "wait", says: "has nothing to do", color: "#9aa3ab", pattern: "falling", idle: true },
];

const UNKNOWN: Omit<Kind, "what"> = { says: "", color: "#7a7f87", pattern: "crossed", idle: false };
const byWhat = new Map(KINDS.map((kind) => [kind.what, kind]));

/** By its first word: the second one of `compute teacher` is the stage. One that this page doesn't know is grey. */
export function kindOf(what: string): Kind {
  const word = what.split(" ", 1)[0]!;
  return byWhat.get(word) ?? { what: word, ...UNKNOWN };
}

/** The kinds that occur, in the order of the table, then unknown ones by their words. */
export function kindsIn(whats: Iterable<string>): Kind[] {
  const found = new Set([...whats].map((what) => kindOf(what).what));
  const known = KINDS.filter((kind) => found.delete(kind.what));
  return [...known, ...[...found].sort().map(kindOf)];
}
