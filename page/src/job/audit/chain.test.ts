import { expect, test } from "vitest";
import type { AuditRecord } from "../../types";
import { describe as described, newestFirst } from "./chain";

const record: AuditRecord = {
  kind: "commit", iteration: 4, policy_version: 4, weights_digest: "a", next_weights_digest: "b", trainer_epoch: 2,
  batches: { "4/train/0": "c" }, abandoned: {}, loss: 0, grad_norm: 0, reward_mean: 0.5, previous: "d",
};

test("the newest record stands first, and the answer stays as it came", () => {
  const answered = [1, 2, 3];
  expect(newestFirst(answered)).toEqual([3, 2, 1]);
  expect(answered).toEqual([1, 2, 3]);
});

test("a record says what it trained, what it made and what it left out", () => {
  expect(described(record)).toBe("1 batch, reward 0.500, version 4 → 5");
  expect(described({ ...record, next_weights_digest: "", abandoned: { "4/train/1": "poison" } })).toBe(
    "1 batch, 1 given up, evaluated only",
  );
  expect(described({ ...record, kind: "rewind" })).toContain("lease 2");
});
