import { expect, test } from "vitest";
import { joined } from "./joined";

function of(iteration: number, num_left_out = 0) {
  return { iteration, batches: [], num_left_out };
}

test("pages overlap without a double, and a newer answer counts", () => {
  const both = joined([of(9), of(8, 1)], [of(8), of(7)]);
  expect(both.map((one) => [one.iteration, one.num_left_out])).toEqual([[9, 0], [8, 1], [7, 0]]);
  expect(joined([], [])).toEqual([]);
});
