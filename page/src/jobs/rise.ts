// A change of the held-out reward, and whether it is more than the standard errors of both scores together.
import type { EvaluationScore } from "../types";

export interface Rise {
  change: number;
  /** Standard error of the change; null where a score has none, as that of one prompt. */
  error: number | null;
  tone: "up" | "down" | "";
}

/** Null before there are two scores. */
export function riseOf(before: EvaluationScore | null, latest: EvaluationScore): Rise | null {
  if (!before || latest.iteration === before.iteration) return null;
  const change = latest.sampled - before.sampled;
  const errors = [before.sampled_error, latest.sampled_error];
  // The scores are of the same prompts, so their difference varies less than this: a change that is coloured is real.
  const error = errors.every((one) => typeof one === "number") ? Math.hypot(...(errors as number[])) : null;
  if (error === null || Math.abs(change) <= error) return { change, error, tone: "" };
  return { change, error, tone: change > 0 ? "up" : "down" };
}
