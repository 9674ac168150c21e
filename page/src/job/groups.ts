// Runs with the same tags as one: the mean of each number over the iterations that all of them have.
import type { JobStatus, SetScore } from "../types";
import { NOTHING, type Story } from "./series";

export interface Run {
  status: JobStatus;
  story: Story;
  /** Of a mean: how many runs it is of. */
  numRuns?: number;
}

/** The groups in the order of their first runs, this job's first; a run without tags stays alone. */
export function byTags(runs: readonly Run[]): Run[] {
  const groups = new Map<string, Run[]>();
  for (const run of runs) {
    const { tags, job_id } = run.status;
    const name = tags.length ? tags.join(", ") : job_id;
    groups.set(name, [...(groups.get(name) ?? []), run]);
  }
  return [...groups].map(([name, members]) => {
    const [first] = members as [Run];
    if (!first.status.tags.length) return first;
    return { numRuns: members.length, status: { ...first.status, name: `${name} (mean of ${members.length})` }, story: meanOf(members.map(({ story }) => story)) };
  });
}

/** Events are left out: they are of one run each. */
export function meanOf(stories: readonly Story[]): Story {
  const [first, ...others] = stories;
  if (!first || !others.length) return first ?? NOTHING;
  const places = stories.map((story) => new Map(story.iterations.map((iteration, place) => [iteration, place])));
  const iterations = first.iterations.filter((iteration) => places.every((at) => at.has(iteration)));
  const columns = new Map<string, (number | null)[]>();
  for (const name of first.columns.keys()) {
    columns.set(name, iterations.map((iteration) => mean(stories.map((story, run) => story.columns.get(name)?.[places[run]!.get(iteration)!] ?? null))));
  }
  const evaluations = first.evaluations.flatMap((score) => {
    const all = stories.map((story) => story.evaluations.find((one) => one.iteration === score.iteration));
    if (!all.every((one) => one !== undefined)) return [];
    const sets: Record<string, SetScore> = {};
    for (const [name, of] of Object.entries(score.sets ?? {})) {
      const each = all.map((one) => one.sets?.[name]);
      if (each.every((one) => one !== undefined)) sets[name] = { ...of, ...meanScore(each) };
    }
    return [{ ...score, ...meanScore(all), ...(score.sets && { sets }) }];
  });
  return { ...NOTHING, iterations, columns, evaluations };
}

function meanScore(all: readonly SetScore[]): { sampled: number; greedy: number | null } {
  return { sampled: mean(all.map((one) => one.sampled)) ?? 0, greedy: mean(all.map((one) => one.greedy)) };
}

/** null where one has no number: a mean over fewer would jump. */
function mean(values: readonly (number | null)[]): number | null {
  let sum = 0;
  for (const value of values) {
    if (value === null) return null;
    sum += value;
  }
  return sum / values.length;
}
