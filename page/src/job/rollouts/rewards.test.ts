import { expect, test } from "vitest";
import { bars, ordered } from "./rewards";

test("few rewards have a bar each, in which the group's own are counted beside the batch's", () => {
  expect(bars([1, 0, 1, 0.5], [1, 0])).toEqual([
    { label: "0", all: 1, here: 1 },
    { label: "0.500", all: 1, here: 0 },
    { label: "1", all: 2, here: 1 },
  ]);
  expect(bars([], [])).toEqual([]);
});

test("many rewards are counted by ten ranges of which each reward is in one", () => {
  const all = [...Array(101).keys()].map((one) => one / 100);
  const found = bars(all, [0, 1]);
  expect(found.map((bar) => bar.label).slice(0, 2)).toEqual(["0 to 0.100", "0.100 to 0.200"]);
  expect(found.at(-1)!.label).toBe("0.900 to 1");
  expect(found.reduce((sum, bar) => sum + bar.all, 0)).toBe(101);
  expect(found.map((bar) => bar.here)).toEqual([1, 0, 0, 0, 0, 0, 0, 0, 0, 1]);
});

test("what has equal rewards stays as it was sampled, in each order", () => {
  const items = ["b1", "a1", "c0"];
  const reward = (name: string): number => Number(name[1]);
  expect(ordered(items, "sampled", reward)).toEqual(items);
  expect(ordered(items, "lowest", reward)).toEqual(["c0", "b1", "a1"]);
  expect(ordered(items, "highest", reward)).toEqual(["b1", "a1", "c0"]);
});
