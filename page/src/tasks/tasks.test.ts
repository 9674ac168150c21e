import { expect, test } from "vitest";
import type { ClockEntry, TaskKind, TaskStatus } from "../types";
import { requestOf, badgeOf, interval, kindInWords, mayCancel, measured, nextRun } from "./tasks";

const NOTHING = { files_done: 0, files_total: 0, bytes_done: 0, bytes_total: 0 };

function task(changes: Partial<TaskStatus>): TaskStatus {
  return {
    task_id: "task-0123456789ab",
    kind: "export",
    queue: "files",
    state: "running",
    reason: "",
    who: "ada",
    created_s: 100,
    started_s: 101,
    ended_s: 0,
    attempts: 1,
    worker: "tasks-1",
    is_cancelling: false,
    result: null,
    ...changes,
  };
}

test("progress goes by bytes where they are known, by files else, and is unknown before either", () => {
  expect(measured(NOTHING)).toEqual({ share: null, text: "" });
  expect(measured({ ...NOTHING, files_done: 3, files_total: 12 })).toEqual({ share: 0.25, text: "3 of 12 files" });
  expect(measured({ files_done: 1, files_total: 1, bytes_done: 1024 ** 3, bytes_total: 4 * 1024 ** 3 })).toEqual({
    share: 0.25,
    text: "1 of 1 file, 1.0 GB of 4.0 GB",
  });
  expect(measured({ ...NOTHING, bytes_done: 9, bytes_total: 3 }).share).toBe(1);
});

test("a task can be cancelled while it waits or runs, once", () => {
  expect(mayCancel(task({ state: "queued" }))).toBe(true);
  expect(mayCancel(task({ state: "running" }))).toBe(true);
  expect(mayCancel(task({ state: "running", is_cancelling: true }))).toBe(false);
  for (const state of ["done", "failed", "cancelled"] as const) expect(mayCancel(task({ state }))).toBe(false);
});

test("a badge says the state, and that a task was asked to end", () => {
  expect(badgeOf(task({ state: "done" }))).toEqual({ tone: "good", text: "done" });
  expect(badgeOf(task({ state: "failed" }))).toEqual({ tone: "bad", text: "failed" });
  expect(badgeOf(task({ is_cancelling: true }))).toEqual({ tone: "cancelling", text: "cancelling" });
});

test("a kind of a newer gateway has its own name", () => {
  expect(kindInWords("verify")).toBe("Verify a job");
  expect(kindInWords("score_offline" as TaskKind)).toBe("score offline");
});

test("an export names its version or choice, and nothing where it is the newest version", () => {
  const request = { job_id: "job-1", version: null, best: false, adapters: false };
  expect(requestOf(task({}))).toBe("");
  expect(requestOf(task({ arguments: request }))).toBe("");
  expect(requestOf(task({ arguments: { ...request, version: 0 } }))).toBe("version 0");
  expect(requestOf(task({ arguments: { ...request, best: true, adapters: true } }))).toBe("best held-out score, LoRA adapters");
});

test("an interval is told without zeros, and a run that is due is now", () => {
  expect([5, 60, 900, 3600, 5400, 86_400, 604_800].map(interval)).toEqual(["5 s", "1 min", "15 min", "1 h", "1 h 30 min", "1 d", "7 d"]);
  const entry = { next_s: 1000 } as ClockEntry;
  expect(nextRun(entry, 880)).toBe("in 2 min");
  expect(nextRun(entry, 999)).toBe("in less than a minute");
  expect(nextRun(entry, 1000)).toBe("now");
  expect(nextRun({ ...entry, next_s: 0 }, 1000)).toBe("now");
});
