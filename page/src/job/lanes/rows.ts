// A timeline as rows of a drawing: each lane has as many rows as it has spans at a time.
import type { Lane, TimelineReport, TimelineSpan } from "../../types";

export const MOST_ROWS = 6;
/** Lanes of one drawing: a canvas has a greatest height. The trace for Perfetto has all. */
export const MOST_LANES = 80;
/** Spans that begin this little before another's end are one after the other: clocks are rounded. */
const ROUNDING_S = 1e-4;

export interface PlacedSpan {
  /** Its index in the report. */
  index: number;
  span: TimelineSpan;
  lane: number;
  /** In its lane, from 0. */
  row: number;
  /** Place among the critical ones, or -1. */
  critical: number;
}

export interface PlacedLane {
  lane: Lane;
  /** By start; within a row none overlaps the next, but in the last one where there are too many. */
  spans: PlacedSpan[];
  rows: PlacedSpan[][];
}

export interface Drawing {
  lanes: PlacedLane[];
  /** Lanes of the report that have no room. */
  numLeftOut: number;
  critical: PlacedSpan[];
  iterations: TimelineReport["iterations"];
  from_s: number;
  to_s: number;
}

/** Places each span. A lane without spans stays: a process that did nothing is what a person looks for. */
export function drawingOf(report: TimelineReport): Drawing {
  const place = new Map(report.critical.map((index, at) => [index, at]));
  const drawn = drawnOf(report);
  const laneOf = new Map(drawn.map((lane, at) => [lane.who, at]));
  const lanes: PlacedLane[] = drawn.map((lane) => ({ lane, spans: [], rows: [] }));
  report.spans.forEach((span, index) => {
    const lane = laneOf.get(span.who);
    if (lane === undefined) return;
    lanes[lane]?.spans.push({ index, span, lane, row: 0, critical: place.get(index) ?? -1 });
  });
  const critical: PlacedSpan[] = [];
  for (const lane of lanes) {
    lane.spans.sort((a, b) => a.span.started_s - b.span.started_s || a.index - b.index);
    lane.rows = packed(lane.spans);
    for (const placed of lane.spans) if (placed.critical >= 0) critical.push(placed);
  }
  critical.sort((a, b) => a.critical - b.critical);
  const starts = [...report.spans.map((span) => span.started_s), ...report.iterations.map((one) => one.started_s)];
  const ends = [...report.spans.map((span) => span.ended_s), ...report.iterations.map((one) => one.ended_s)];
  const from_s = starts.length ? least(starts) : 0;
  const numLeftOut = report.lanes.length - drawn.length;
  return { lanes, numLeftOut, critical, iterations: report.iterations, from_s, to_s: ends.length ? -least(ends.map((x) => -x)) : 1 };
}

/** The lanes that are drawn, in the order of the report; of too many those that others waited for stay. */
function drawnOf(report: TimelineReport): Lane[] {
  if (report.lanes.length <= MOST_LANES) return report.lanes;
  const awaited = new Set(report.critical.map((index) => report.spans[index]?.who));
  const first = [...report.lanes].sort((a, b) => Number(awaited.has(b.who)) - Number(awaited.has(a.who)));
  const chosen = new Set(first.slice(0, MOST_LANES));
  return report.lanes.filter((lane) => chosen.has(lane));
}

/** Gives each span the first row that is free at its start. */
function packed(spans: PlacedSpan[]): PlacedSpan[][] {
  const rows: PlacedSpan[][] = [];
  const ends: number[] = [];
  for (const placed of spans) {
    let row = ends.findIndex((end) => end <= placed.span.started_s + ROUNDING_S);
    if (row < 0) row = Math.min(rows.length, MOST_ROWS - 1);
    placed.row = row;
    (rows[row] ??= []).push(placed);
    ends[row] = Math.max(ends[row] ?? 0, placed.span.ended_s);
  }
  return rows;
}

/** Of any number of numbers: Math.min takes its arguments on the stack. */
function least(numbers: number[]): number {
  return numbers.reduce((a, b) => Math.min(a, b));
}

/** The first span of a row that ends after `at_s`: where drawing begins. Rows are in order, so this is a bisection. */
export function firstAfter(row: PlacedSpan[], at_s: number): number {
  let low = 0;
  let high = row.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if ((row[middle]?.span.ended_s ?? 0) <= at_s) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** The span of a row at a time, or within `reach_s` of it: short spans are narrower than a pointer. */
export function spanAt(row: PlacedSpan[], at_s: number, reach_s: number): PlacedSpan | null {
  let best: PlacedSpan | null = null;
  let nearest = reach_s;
  for (let at = firstAfter(row, at_s - reach_s); at < row.length; at += 1) {
    const placed = row[at];
    if (!placed || placed.span.started_s > at_s + reach_s) break;
    if (placed.span.started_s <= at_s && at_s <= placed.span.ended_s) return placed;
    const away = Math.max(placed.span.started_s - at_s, at_s - placed.span.ended_s);
    if (away <= nearest) {
      nearest = away;
      best = placed;
    }
  }
  return best;
}
