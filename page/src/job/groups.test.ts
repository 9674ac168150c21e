// @vitest-environment happy-dom
import { expect, it } from "vitest";
import type { EvaluationScore, JobStatus } from "../types";
import { evaluationPoints } from "./axes";
import { setsOf } from "./curves";
import { byTags, type Run } from "./groups";
import { metricPoints, NOTHING } from "./series";

function run(job_id: string, tags: string[], rewards: (number | null)[], score: number): Run {
  const story = {
    ...NOTHING,
    iterations: rewards.map((_, place) => place),
    columns: new Map([["reward_mean", rewards]]),
    evaluations: [{ iteration: 0, policy_version: 0, sampled: score, greedy: null, num_prompts: 8 } as EvaluationScore],
  };
  return { status: { job_id, tags, name: job_id } as unknown as JobStatus, story };
}

it("draws the mean of runs with the same tags where all of them have a number, and others by themselves", () => {
  const groups = byTags([run("a", ["slow"], [0, 0.5, 1], 0.2), run("b", [], [0.25], 0.1), run("c", ["slow"], [1, null], 0.6), run("d", ["fast"], [0.75], 0.3)]);
  expect(groups.map(({ status }) => status.name)).toEqual(["slow (mean of 2)", "b", "fast (mean of 1)"]);
  expect(metricPoints(groups[0]!.story, "reward_mean")).toEqual([[0, 0.5]]);
  expect(groups[0]!.story.iterations).toEqual([0, 1]);
  expect(groups[0]!.story.evaluations).toEqual([{ iteration: 0, policy_version: 0, sampled: 0.4, greedy: null, num_prompts: 8 }]);
  expect(metricPoints(groups[2]!.story, "reward_mean")).toEqual([[0, 0.75]]);
});

it("draws the mean of a further set of the evaluation where all runs have it", () => {
  const [first, second] = [run("a", ["slow"], [0], 0.2), run("b", ["slow"], [0], 0.6)];
  const scored = (sampled: number): object => ({ sampled, greedy: 0.5, num_prompts: 2 });
  Object.assign(first.story.evaluations[0]!, { sets: { aime: scored(0.1), easy: scored(1) } });
  Object.assign(second.story.evaluations[0]!, { sets: { aime: scored(0.3) } });
  const [mean] = byTags([first, second]);
  expect(setsOf([mean!])).toEqual(["aime"]);
  expect(evaluationPoints(mean!.story, "sampled", "iteration", "aime")).toEqual([[0, 0.2]]);
  expect(evaluationPoints(mean!.story, "greedy", "iteration", "aime")).toEqual([[0, 0.5]]);
  expect(evaluationPoints(mean!.story, "greedy", "iteration", "easy")).toEqual([]);
});
