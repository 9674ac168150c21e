import { expect, test } from "vitest";
import type { CompletionView } from "../../types";
import { differenceShade, shadeClass, stretchesOf, surpriseShade, tokenFacts } from "./heat";

export const trajectory: CompletionView = {
  sample: 0,
  text: "a?|7|b",
  reward: 1,
  reward_breakdown: {},
  unscorable: {},
  advantage: 0.5,
  finish_reason: "stop",
  pieces: ["a", "?", "|7|", "b"],
  sampled: [true, true, false, true],
  generator_logprobs: [-0.01, -3, null, -0.7],
  trainer_logprobs: [-0.01, -2.5, null, null],
  turns: [
    { start: 0, end: 2, finish_reason: "stop", reward: 0.25, advantage: null, begins_anew: false },
    { start: 3, end: 4, finish_reason: "stop", reward: 0.75, advantage: null, begins_anew: true },
  ],
  stop: "done",
  environment_metrics: {},
  columns: {},
};

test("the less likely a token, the stronger its shade, to the end of the scale", () => {
  expect([0, -0.04, -0.05, -0.6, -1.5, -8, -400].map(surpriseShade)).toEqual([0, 0, 1, 3, 4, 7, 8]);
  expect(surpriseShade(null)).toBeNull();
});

test("a difference has a side and a power of ten", () => {
  expect(differenceShade(-1, -1)).toBe(0);
  expect(differenceShade(-1, -1 + 2e-6)).toBe(0);
  expect(differenceShade(-1, -0.998)).toBe(3);
  expect(differenceShade(-1, -3)).toBe(-8);
  expect(differenceShade(-1, null)).toBeNull();
});

test("an observation has no shade in any mode, and what isn't known says so", () => {
  expect([0, 1, 2, 3].map((at) => shadeClass(trajectory, at, "generator"))).toEqual(["", "heat-5", "", "heat-3"]);
  expect([0, 1, 2, 3].map((at) => shadeClass(trajectory, at, "difference"))).toEqual(["", "more-7", "", "unknown"]);
  expect(shadeClass(trajectory, 1, "plain")).toBe("");
});

test("the facts of a token are both numbers and their difference", () => {
  expect(tokenFacts(trajectory, 1)).toEqual([
    ["generator", "-3 (4.98 %)"],
    ["trainer", "-2.500 (8.21 %)"],
    ["difference", "0.5000"],
  ]);
  expect(tokenFacts(trajectory, 2)[0]?.[1]).toContain("not trained");
  expect(tokenFacts(trajectory, 3)[1]?.[1]).toContain("not computed");
});

test("a trajectory is its turns, with what was observed between them", () => {
  const stretches = stretchesOf(trajectory).map(({ kind, start, end, turn, reward, begins_anew }) => [
    ...[kind, start, end, turn, reward],
    begins_anew ?? false,
  ]);
  expect(stretches).toEqual([
    ["sampled", 0, 2, 1, 0.25, false],
    ["observed", 2, 3, 1, null, true],
    ["sampled", 3, 4, 2, 0.75, false],
  ]);
  expect(stretchesOf({ ...trajectory, turns: null })).toHaveLength(1);
});
