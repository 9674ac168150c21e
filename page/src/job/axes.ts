// What curves are drawn over: iterations, the time since the job's first one, or the tokens that were sampled till then.
import { duration, plural } from "../ui/format";
import type { Points, Story } from "./series";

export const AXES = ["iteration", "time", "tokens"] as const;
export type Axis = (typeof AXES)[number];
export const AXIS_NAMES: Record<Axis, string> = { iteration: "iterations", time: "wall-clock", tokens: "tokens" };

/** An x for each iteration: where it ended. */
export function xsOf(story: Story, axis: Axis): number[] {
  if (axis === "iteration") return story.iterations;
  if (axis === "time") {
    const started = story.columns.get("started_s") ?? [];
    const took = story.columns.get("wall_s") ?? [];
    const first = started[0] ?? 0;
    return rising(story.iterations.map((_, place) => (started[place] ?? first) - first + (took[place] ?? 0)));
  }
  const tokens = story.columns.get("num_tokens") ?? [];
  let sum = 0;
  // Of a thinned story each iteration stands for those before it that are still to come.
  const many = (place: number): number => (story.isThinned ? story.iterations[place]! - (story.iterations[place - 1] ?? -1) : 1);
  return story.iterations.map((_, place) => (sum += (tokens[place] ?? 0) * many(place)));
}

/** A chart's xs ascend, whatever the clocks of two hosts said. */
function rising(xs: number[]): number[] {
  let last = 0;
  return xs.map((x) => (last = Math.max(last, x)));
}

/** Where version `iteration` was evaluated: before the iteration of its number, after the one before. */
export function evaluatedAt(story: Story, xs: readonly number[], axis: Axis, iteration: number): number {
  if (axis === "iteration") return iteration;
  const place = story.iterations.findLastIndex((one) => one < iteration);
  return place < 0 ? 0 : (xs[place] ?? 0);
}

/** set: a further set of the evaluation, "" of the one that counts. */
export function evaluationPoints(story: Story, which: "sampled" | "greedy", axis: Axis, set = ""): Points {
  const xs = xsOf(story, axis);
  const points: Points = [];
  for (const score of story.evaluations) {
    const value = (set ? score.sets?.[set] : score)?.[which] ?? null;
    if (value !== null) points.push([evaluatedAt(story, xs, axis, score.iteration), value]);
  }
  return points;
}

/** The place of the iteration that stands nearest to x; -1 where there is none. */
export function placeAt(xs: readonly number[], x: number): number {
  let low = 0;
  let high = xs.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (xs[middle]! < x) low = middle + 1;
    else high = middle;
  }
  return low > 0 && x - xs[low - 1]! <= xs[low]! - x ? low - 1 : high < 0 ? -1 : low;
}

/** "iteration 12", "after 3 min 5 s", "after 120,000 tokens". */
export function inWords(axis: Axis, x: number): string {
  if (axis === "iteration") return `iteration ${x}`;
  return `after ${axis === "time" ? duration(x) : plural(x, "token")}`;
}

/** A label below the axis: "12", "3 min", "1.2M". */
export function shortly(axis: Axis, x: number, step: number): string {
  if (axis === "iteration") return String(x);
  if (axis === "time") return step >= 3600 ? `${x / 3600} h` : step >= 60 ? `${x / 60} min` : `${x} s`;
  const [size, unit] = x >= 1e9 ? [1e9, "G"] : x >= 1e6 ? [1e6, "M"] : x >= 1e3 ? [1e3, "k"] : [1, ""];
  return `${Number((x / size).toPrecision(4))}${unit}`;
}

/** Steps between two labels that uPlot may choose. */
export const STEPS: Record<Axis, number[]> = {
  iteration: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000],
  time: [1, 2, 5, 10, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14_400, 21_600, 43_200, 86_400, 172_800, 604_800],
  tokens: [1, 2, 5].flatMap((digit) => [...Array(16).keys()].map((zeros) => digit * 10 ** zeros)).sort((a, b) => a - b),
};
