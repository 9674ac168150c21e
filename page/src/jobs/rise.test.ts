import { expect, it } from "vitest";
import type { EvaluationScore } from "../types";
import { riseOf } from "./rise";

function score(iteration: number, sampled: number, sampled_error?: number): EvaluationScore {
  return { iteration, policy_version: iteration, sampled, num_prompts: 16, ...(sampled_error === undefined ? {} : { sampled_error }) } as EvaluationScore;
}

it("colours a change that is more than the errors of both scores together", () => {
  expect(riseOf(score(0, 0.2, 0.03), score(4, 0.4, 0.04))).toEqual({ change: 0.2, error: 0.05, tone: "up" });
  expect(riseOf(score(0, 0.4, 0.03), score(4, 0.2, 0.04))?.tone).toBe("down");
});

it("colours none that is within them, or of which the error is not known", () => {
  expect(riseOf(score(0, 0.0216, 0.01), score(4, 0.0135, 0.008))?.tone).toBe("");
  expect(riseOf(score(0, 0.2, 0), score(4, 0.2, 0))?.tone).toBe("");
  expect(riseOf(score(0, 0.2), score(4, 0.9, 0.01))).toEqual({ change: 0.7, error: null, tone: "" });
});

it("has none before there are two scores", () => {
  expect(riseOf(null, score(0, 0.2, 0.1))).toBeNull();
  expect(riseOf(score(0, 0.2), score(0, 0.2))).toBeNull();
});
