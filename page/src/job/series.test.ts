// @vitest-environment happy-dom
import { expect, it } from "vitest";
import type { JobStory } from "../types";
import { evaluationPoints, inWords, placeAt, shortly, xsOf } from "./axes";
import { metricPoints, NOTHING, numbersAt, restarts, withAnswer, type Story } from "./series";

function answer(after: string, iterations: number[], columns: Record<string, (number | null)[]>, events: object[] = [], thinned = false): JobStory {
  return { after, iterations, columns, thinned, events: events.map((event, place) => ({ id: `${after}${place}`, event })) } as unknown as JobStory;
}

function storyOf(...answers: JobStory[]): Story {
  return answers.reduce((story, one) => withAnswer(story, one).now, NOTHING);
}

it("grows by what is new, and a number that comes later has no value before", () => {
  const story = storyOf(answer("1", [0, 1], { reward_mean: [0.1, 0.2] }), answer("2", [2], { reward_mean: [0.3], kl: [0.5] }));
  expect(story.iterations).toEqual([0, 1, 2]);
  expect(metricPoints(story, "reward_mean")).toEqual([[0, 0.1], [1, 0.2], [2, 0.3]]);
  expect(metricPoints(story, "kl")).toEqual([[2, 0.5]]);
  expect([...numbersAt(story, 1)]).toEqual([["reward_mean", 0.2]]);
  expect(withAnswer(story, answer("2", [], {})).now).toBe(story);
});

it("forgets what a rewind took back, with the rows that came beside it, and asks for it again", () => {
  const before = storyOf(answer("1", [0, 1, 2], { reward_mean: [0.1, 0.2, 0.3] }));
  const rewound = withAnswer(before, answer("2", [3], { reward_mean: [0.9] }, [{ type: "rewound", iteration: 1, committed: 2 }]));
  expect(rewound.isRewound).toBe(true);
  expect(rewound.now.iterations).toEqual([0]);
  expect(rewound.now.events.map(({ type }) => type)).toEqual(["rewound"]);
  const again = withAnswer(rewound.now, answer("2", [1, 2, 3], { reward_mean: [0.2, 0.3, 0.4] }));
  expect(again.isRewound).toBe(false);
  expect(metricPoints(again.now, "reward_mean").at(-1)).toEqual([3, 0.4]);
});

it("shows some iterations of a long job at once, over about as many tokens, and then all", () => {
  const thinned = storyOf(answer("1", [0, 2, 4], { num_tokens: [10, 30, 50] }, [{ type: "health_changed" }], true));
  expect([thinned.isThinned, xsOf(thinned, "tokens")]).toEqual([true, [10, 70, 170]]);
  const { now } = withAnswer(thinned, answer("1", [0, 1, 2, 3, 4], { num_tokens: [10, 20, 30, 40, 50] }));
  expect([now.isThinned, now.iterations, now.events.length, xsOf(now, "tokens")]).toEqual([false, [0, 1, 2, 3, 4], 1, [10, 30, 60, 100, 150]]);
  expect(withAnswer(thinned, answer("1", [], {})).now).toMatchObject({ isThinned: false, iterations: [] });
});

it("takes the first answer whole, though it tells of a rewind long ago", () => {
  const { now, isRewound } = withAnswer(NOTHING, answer("9", [0, 1, 2], { reward_mean: [1, 2, 3] }, [{ type: "rewound", iteration: 1, committed: 2 }]));
  expect([isRewound, now.iterations]).toEqual([false, [0, 1, 2]]);
});

it("knows a trainer that came after another from the first one", () => {
  const started = { type: "trainer_started", resumed: false, next_iteration: 0 };
  const story = storyOf(answer("a", [], {}, [started, { type: "rewound", iteration: 0, committed: -1 }, started]));
  expect([...restarts(story.events)]).toEqual(["a2"]);
});

it("draws over iterations, time and tokens", () => {
  const story = {
    ...storyOf(answer("1", [0, 1, 2], { started_s: [100, 110, 120], wall_s: [5, 5, 10], num_tokens: [10, 20, 30] })),
    evaluations: [0, 2, 3].map((iteration) => ({ iteration, policy_version: iteration, sampled: 0.5, greedy: null, num_prompts: 1 })),
  };
  expect(xsOf(story, "iteration")).toEqual([0, 1, 2]);
  expect(xsOf(story, "time")).toEqual([5, 15, 30]);
  expect(xsOf(story, "tokens")).toEqual([10, 30, 60]);
  expect(evaluationPoints(story, "sampled", "tokens")).toEqual([[0, 0.5], [30, 0.5], [60, 0.5]]);
  expect(evaluationPoints(story, "greedy", "time")).toEqual([]);
  expect([inWords("iteration", 3), inWords("time", 75), inWords("tokens", 1200)]).toEqual(["iteration 3", "after 1 min 15 s", "after 1,200 tokens"]);
  expect([shortly("time", 120, 60), shortly("time", 7200, 3600), shortly("tokens", 1_500_000, 500_000)]).toEqual(["2 min", "2 h", "1.5M"]);
});

it("finds the iteration that is nearest to the cursor", () => {
  const xs = [5, 15, 30];
  expect([0, 9, 11, 22, 23, 99].map((x) => placeAt(xs, x))).toEqual([0, 0, 1, 1, 2, 2]);
  expect(placeAt([], 1)).toBe(-1);
});
