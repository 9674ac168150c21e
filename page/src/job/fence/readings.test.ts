import { expect, test } from "vitest";
import type { GeneratorSeen } from "../../types";
import { byFrequency, doing, furtherInfo, known, MOST_GONE, openIteration, speed, versionHeld } from "./readings";

test("an open iteration shows how old its versions are and how much of it is there", () => {
  const one = { iteration: 7, oldest_version: 5, newest_version: 7, batches_expected: 8, batches_published: 2, batches_dead: 1 };
  expect(openIteration(one)).toMatchObject({ versions: "5 to 7", lag: "0 to 2 versions", publishedShare: 0.25, deadShare: 0.125 });
  expect(openIteration({ ...one, oldest_version: 6, newest_version: 6 })).toMatchObject({ versions: "6", lag: "1 version" });
  expect(openIteration({ ...one, batches_expected: 0 }).publishedShare).toBe(0);
});

test("rejections stand by how often they happened", () => {
  expect(byFrequency({ late: 1, version: 5, digest: 1 })).toEqual([["version", 5], ["digest", 1], ["late", 1]]);
});

function seen(worker_id: string, seen_s = 0.5, says: Partial<GeneratorSeen> = {}): GeneratorSeen {
  return {
    worker_id, seen_s, services: [], leaves_alone: {}, doing: "", model: "", policy_version: null, weights_digest: "",
    tokens_per_s: 0, batches: [], loading_weights: [], rejected_weights: "", unfit_weights: "", awake_for: "", engine: "", wrong_engine: [],
    not_reproducible: "", no_kept_sets: "", no_routes: "", ...says,
  };
}

function saying(says: Partial<GeneratorSeen>): GeneratorSeen {
  return seen("g-1", 0.5, says);
}

test("a generator that was killed stays on the page as gone, and a new one stands beside it", () => {
  const first = known([], [seen("g-2"), seen("g-10"), seen("g-1", 9)], 100);
  expect(first.map((one) => [one.seen.worker_id, one.presence])).toEqual([["g-1", "silent"], ["g-2", "live"], ["g-10", "live"]]);
  const second = known(first, [seen("g-2"), seen("g-11")], 200);
  const third = known(second, [seen("g-2"), seen("g-11")], 300);
  expect(third.map((one) => [one.seen.worker_id, one.gone_s])).toEqual([["g-2", null], ["g-11", null], ["g-1", 200], ["g-10", 200]]);
  expect(known(third, [seen("g-1")], 400)[0]).toMatchObject({ presence: "live", gone_s: null });
});

test("of the gone ones the newest are kept", () => {
  let all = known([], [], 0);
  for (let at = 0; at < 50; at += 1) all = known(all, [seen(`g-${at}`)], at);
  expect(all).toHaveLength(1 + MOST_GONE);
  expect(all[1]?.seen.worker_id).toBe("g-48");
});

test("what a generator does is in its own words, else what is known of it", () => {
  expect(doing(saying({ doing: "generating 3/train/1" }), "3/train/1")).toBe("generating 3/train/1");
  expect(doing(saying({ loading_weights: ["job/weights/v000003"] }), "3/train/1")).toBe("loading job/weights/v000003");
  expect([doing(saying({}), "3/train/1"), doing(saying({}), undefined)]).toEqual(["holds 3/train/1", "waiting"]);
  expect([speed(saying({ tokens_per_s: 1234.5 })), speed(saying({}))]).toEqual(["1,235", "—"]);
  expect([versionHeld(saying({ policy_version: 0 })), versionHeld(saying({}))]).toEqual(["0", "none"]);
  const says = { policy_version: 3, engine: "torch 2", wrong_engine: ["job-1", "job-2"], leaves_alone: { "job-3": "no model" } };
  expect(furtherInfo(saying(says))).toEqual([
    ["leaves_alone", "job-3: no model"], ["engine", "torch 2"], ["wrong_engine", "job-1, job-2"],
  ]);
});
