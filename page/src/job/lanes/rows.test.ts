import { expect, test } from "vitest";
import type { TimelineReport, TimelineSpan } from "../../types";
import { kindOf, kindsIn } from "./kinds";
import { drawingOf, MOST_LANES, MOST_ROWS, spanAt } from "./rows";

function span(who: string, what: string, started_s: number, ended_s: number): TimelineSpan {
  return { who, what, iteration: 0, batch_id: "", started_s, ended_s };
}

function report(spans: TimelineSpan[], critical: number[] = []): TimelineReport {
  const names = [...new Set(spans.map((one) => one.who))];
  const lanes = names.map((who) => ({ who, kind: "generator" as const, busy_s: 1, idle_share: 0 }));
  return { job_id: "job-1", spans, lanes, critical, iterations: [], words: "" };
}

test("spans at the same time stand in rows of their own, later ones in the first that is free", () => {
  const drawing = drawingOf(
    report([span("a", "generate", 0, 4), span("a", "generate", 1, 3), span("a", "score", 3, 5), span("a", "wait", 5, 6)]),
  );
  expect(drawing.lanes[0]?.spans.map((placed) => placed.row)).toEqual([0, 1, 1, 0]);
  expect([drawing.from_s, drawing.to_s]).toEqual([0, 6]);
});

test("what overlaps more often than there are rows is in the last one", () => {
  const drawing = drawingOf(report(Array.from({ length: 9 }, (_, at) => span("a", "generate", at / 10, 9))));
  expect(Math.max(...(drawing.lanes[0]?.spans ?? []).map((placed) => placed.row))).toBe(MOST_ROWS - 1);
});

test("the critical spans are in their order over all lanes, and a lane without a span stays", () => {
  const spans = [span("a", "generate", 0, 2), span("trainer", "train", 2, 3), span("a", "wait", 2, 4)];
  const timeline = report(spans, [0, 1]);
  timeline.lanes.push({ who: "idle one", kind: "generator", busy_s: 0, idle_share: 1 });
  const drawing = drawingOf(timeline);
  expect(drawing.critical.map((placed) => [placed.lane, placed.index])).toEqual([[0, 0], [1, 1]]);
  expect(drawing.lanes[2]?.spans).toEqual([]);
});

test("a pointer finds the span under it, and beside it the nearest in reach", () => {
  const row = drawingOf(report([span("a", "load", 1, 1.001), span("a", "train", 2, 3)])).lanes[0]?.rows[0] ?? [];
  expect(spanAt(row, 2.5, 0.1)?.index).toBe(1);
  expect(spanAt(row, 1.05, 0.1)?.index).toBe(0);
  expect(spanAt(row, 1.5, 0.1)).toBeNull();
});

test("twenty thousand spans are placed at once", () => {
  const many = Array.from({ length: 20_000 }, (_, at) => span(`generator-${at % 4}`, "generate", at, at + 3.5));
  const drawing = drawingOf(report(many, [19_999, 3]));
  expect(drawing.lanes.map((lane) => lane.rows.length)).toEqual([1, 1, 1, 1]);
  expect(drawing.to_s).toBe(20_002.5);
});

test("of a thousand generators those that others waited for are drawn, and the rest is counted", () => {
  const many = Array.from({ length: 1000 }, (_, at) => span(`generator-${at}`, "generate", 0, 1));
  const drawing = drawingOf(report(many, [999]));
  expect([drawing.lanes.length, drawing.numLeftOut]).toEqual([MOST_LANES, 1000 - MOST_LANES]);
  expect(drawing.critical.map((placed) => placed.span.who)).toEqual(["generator-999"]);
  expect(drawing.lanes[0]?.lane.who).toBe("generator-0");
});

test("a stage worker's span is of the kind of its first word, and keeps its stage's name", () => {
  expect([kindOf("compute teacher").says, kindOf("compute teacher").what]).toEqual(["computes a stage's columns", "compute"]);
  expect(kindsIn(["compute teacher", "train", "compute judge", "something new"]).map((kind) => kind.what)).toEqual([
    "train", "compute", "something",
  ]);
});
