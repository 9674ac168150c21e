import { expect, it } from "vitest";
import { headsOf } from "./heads";

const named = (...names: string[]) => headsOf(names.map((name, index) => ({ name, job_id: `job-000${index}` })));

it("a run is headed by its name, without what all names begin with", () => {
  expect(named("sums, rate=1e-4", "sums, rate=1e-3", "sums, rate=1e-2")).toEqual(["rate=1e-4", "rate=1e-3", "rate=1e-2"]);
  expect(named("sums", "control")).toEqual(["sums", "control"]);
  expect(named("sums long", "sums longer")).toEqual(["long", "longer"]);
});

it("runs of the same name are told apart by the ends of their ids", () => {
  expect(named("sums", "sums", "other")).toEqual(["sums 0000", "sums 0001", "other"]);
});

it("a single run keeps its whole name", () => {
  expect(named("sums, rate=1e-4")).toEqual(["sums, rate=1e-4"]);
});
