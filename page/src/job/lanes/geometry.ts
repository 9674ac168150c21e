// Where lanes and rows stand in the drawing, in CSS pixels.
import type { Drawing, PlacedSpan } from "./rows";
import { spanAt } from "./rows";
import type { View } from "./view";

export const HEAD = 40;
export const LABEL = 22;
export const ROW = 18;
export const GAP = 10;
/** A span is found this far beside it. */
const REACH = 4;

export interface LaneBox {
  top: number;
  /** Top of its first row. */
  rows: number;
  bottom: number;
}

export function boxesOf(drawing: Drawing): LaneBox[] {
  let top = HEAD;
  return drawing.lanes.map((lane) => {
    const rows = top + LABEL;
    const bottom = rows + Math.max(1, lane.rows.length) * ROW;
    const box = { top, rows, bottom };
    top = bottom + GAP;
    return box;
  });
}

export function heightOf(boxes: LaneBox[]): number {
  return (boxes.at(-1)?.bottom ?? HEAD) + GAP;
}

export function xOf(at_s: number, view: View, width: number): number {
  return ((at_s - view.from_s) / (view.to_s - view.from_s)) * width;
}

export function timeAt(x: number, view: View, width: number): number {
  return view.from_s + (x / Math.max(1, width)) * (view.to_s - view.from_s);
}

export interface Shown {
  drawing: Drawing;
  boxes: LaneBox[];
  view: View;
  width: number;
}

/** The span under a pointer, or null. */
export function hit(shown: Shown, x: number, y: number): PlacedSpan | null {
  const lane = shown.boxes.findIndex((box) => y >= box.rows && y < box.bottom);
  const box = shown.boxes[lane];
  const row = box && shown.drawing.lanes[lane]?.rows[Math.floor((y - box.rows) / ROW)];
  if (!row) return null;
  const a_pixel = (shown.view.to_s - shown.view.from_s) / Math.max(1, shown.width);
  return spanAt(row, timeAt(x, shown.view, shown.width), REACH * a_pixel);
}
