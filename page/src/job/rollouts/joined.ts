// Pages of a list that grows at its head while a person reads on at its end.
import type { IterationView } from "../../types";

/** Both lists as one, each iteration once and newest first; of one that both have, the first list's counts: an iteration
 * may be trained again after a rewind. */
export function joined(newer: readonly IterationView[], older: readonly IterationView[]): IterationView[] {
  const found = new Map(older.map((one) => [one.iteration, one]));
  for (const one of newer) found.set(one.iteration, one);
  return [...found.values()].sort((a, b) => b.iteration - a.iteration);
}
