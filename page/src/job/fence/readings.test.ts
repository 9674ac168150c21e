import { expect, test } from "vitest";
import type { GeneratorSeen } from "../../types";
import { byFrequency, doing, furtherInfo, known, MOST_GONE, openIteration, speed } from "./readings";

test("an open iteration shows how old its versions are and how much of it is there", () => {
  const one = { iteration: 7, oldest_version: 5, newest_version: 7, batches_expected: 8, batches_published: 2, batches_dead: 1 };
  expect(openIteration(one)).toMatchObject({ versions: "5 to 7", lag: "0 to 2 versions", publishedShare: 0.25, deadShare: 0.125 });
  expect(openIteration({ ...one, oldest_version: 6, newest_version: 6 })).toMatchObject({ versions: "6", lag: "1 version" });
  expect(openIteration({ ...one, batches_expected: 0 }).publishedShare).toBe(0);
});

test("rejections stand by how often they happened", () => {
  expect(byFrequency({ late: 1, version: 5, digest: 1 })).toEqual([["version", 5], ["digest", 1], ["late", 1]]);
});

function seen(generator_id: string, seen_s = 0.5): GeneratorSeen {
  return { generator_id, seen_s, info: {} };
}

test("a generator that was killed stays on the page as gone, and a new one stands beside it", () => {
  const first = known([], [seen("g-2"), seen("g-10"), seen("g-1", 9)], 100);
  expect(first.map((one) => [one.seen.generator_id, one.presence])).toEqual([["g-1", "silent"], ["g-2", "live"], ["g-10", "live"]]);
  const second = known(first, [seen("g-2"), seen("g-11")], 200);
  const third = known(second, [seen("g-2"), seen("g-11")], 300);
  expect(third.map((one) => [one.seen.generator_id, one.gone_s])).toEqual([["g-2", null], ["g-11", null], ["g-1", 200], ["g-10", 200]]);
  expect(known(third, [seen("g-1")], 400)[0]).toMatchObject({ presence: "live", gone_s: null });
});

test("of the gone ones the newest are kept", () => {
  let all = known([], [], 0);
  for (let at = 0; at < 50; at += 1) all = known(all, [seen(`g-${at}`)], at);
  expect(all).toHaveLength(1 + MOST_GONE);
  expect(all[1]?.seen.generator_id).toBe("g-48");
});

test("what a generator does is in its own words, else what is known of it", () => {
  expect(doing({ doing: "generating 3/train/1" }, "3/train/1")).toBe("generating 3/train/1");
  expect([doing({}, "3/train/1"), doing({}, undefined)]).toEqual(["holds 3/train/1", "waiting"]);
  expect([speed({ tokens_per_s: "1234.5" }), speed({}), speed({ tokens_per_s: "<b>" })]).toEqual(["1,235", "—", "—"]);
  expect(furtherInfo({ policy_version: "3", engine: "torch 2", rejected_weights: "" })).toEqual([["engine", "torch 2"]]);
});
