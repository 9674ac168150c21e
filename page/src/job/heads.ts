// The heads of a table's columns, one for each run that is compared.
import type { JobStatus } from "../types";

/** Each run by its name, without what all names begin with up to a word's end: "sums, rate=1e-4" and "sums, rate=1e-3" are
 * "rate=1e-4" and "rate=1e-3". Runs of the same name are told apart by the ends of their ids. */
export function headsOf(runs: readonly Pick<JobStatus, "name" | "job_id">[]): string[] {
  const words = runs.map(({ name }) => name.split(/(?<=[ ,])/));
  const shortest = Math.min(...words.map(({ length }) => length));
  let common = 0;
  while (runs.length > 1 && common < shortest - 1 && words.every((of) => of[common] === words[0]![common])) common += 1;
  const heads = words.map((of) => of.slice(common).join("").trim());
  return heads.map((head, index) => (heads.filter((other) => other === head).length > 1 ? `${head} ${runs[index]!.job_id.slice(-4)}` : head));
}
