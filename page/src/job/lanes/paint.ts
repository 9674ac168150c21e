// Paints the lanes on a canvas: thousands of spans are a few milliseconds.
import { GAP, HEAD, heightOf, LABEL, ROW, xOf } from "./geometry";
import type { LaneBox, Shown } from "./geometry";
import { kindOf } from "./kinds";
import type { Kind } from "./kinds";
import { firstAfter } from "./rows";
import type { PlacedSpan } from "./rows";
import { ticksOf } from "./view";

export interface Ink {
  text: string;
  faint: string;
  line: string;
  band: string;
  critical: string;
}

/** Narrower than this a span is a line without a pattern and a word. */
const PATTERN_FROM = 7;
const WORD_FROM = 46;
const FONT = "11px system-ui, sans-serif";

export function paint(canvas: CanvasRenderingContext2D, shown: Shown, ink: Ink, marked: PlacedSpan | null): void {
  const height = heightOf(shown.boxes);
  canvas.clearRect(0, 0, shown.width, height);
  canvas.font = FONT;
  canvas.textBaseline = "middle";
  paintIterations(canvas, shown, ink, height);
  paintTicks(canvas, shown, ink, height);
  shown.drawing.lanes.forEach((lane, at) => {
    const box = shown.boxes[at] as LaneBox;
    canvas.fillStyle = ink.line;
    canvas.fillRect(0, box.top + LABEL - 2, shown.width, 1);
    lane.rows.forEach((row, number) => paintRow(canvas, shown, row, box.rows + number * ROW, ink));
  });
  paintCritical(canvas, shown, ink);
  if (marked) outline(canvas, shown, marked, ink.text, 2);
}

function paintIterations(canvas: CanvasRenderingContext2D, shown: Shown, ink: Ink, height: number): void {
  let free = 0;
  shown.drawing.iterations.forEach((one, at) => {
    const from = xOf(one.started_s, shown.view, shown.width);
    const to = xOf(one.ended_s, shown.view, shown.width);
    if (to < 0 || from > shown.width) return;
    if (at % 2 === 0) {
      canvas.fillStyle = ink.band;
      canvas.fillRect(from, 0, to - from, height);
    }
    canvas.fillStyle = ink.line;
    canvas.fillRect(Math.round(from), 0, 1, height);
    const label = to - from > 74 ? `iteration ${one.iteration}` : `${one.iteration}`;
    const left = Math.max(from, 0) + 5;
    const wide = canvas.measureText(label).width;
    if (left < free || left + wide > Math.max(to, left + 12)) return;
    canvas.fillStyle = ink.text;
    canvas.fillText(label, left, 11);
    free = left + wide + 6;
  });
}

function paintTicks(canvas: CanvasRenderingContext2D, shown: Shown, ink: Ink, height: number): void {
  for (const tick of ticksOf(shown.view, shown.drawing.from_s, shown.width / 110)) {
    const x = Math.round(xOf(tick.at_s, shown.view, shown.width));
    canvas.fillStyle = ink.line;
    canvas.fillRect(x, HEAD - 12, 1, height - HEAD + 12 - GAP);
    canvas.fillStyle = ink.faint;
    const wide = canvas.measureText(tick.label).width;
    canvas.fillText(tick.label, Math.min(Math.max(2, x + 4), shown.width - wide - 2), HEAD - 10);
  }
}

function paintRow(canvas: CanvasRenderingContext2D, shown: Shown, row: PlacedSpan[], top: number, ink: Ink): void {
  let painted = -1;
  for (let at = firstAfter(row, shown.view.from_s); at < row.length; at += 1) {
    const { span } = row[at] as PlacedSpan;
    if (span.started_s > shown.view.to_s) break;
    const from = Math.max(-2, xOf(span.started_s, shown.view, shown.width));
    const to = Math.min(shown.width + 2, xOf(span.ended_s, shown.view, shown.width));
    // Of spans within one pixel the first is painted: they can't be told apart, and there may be thousands.
    if (to - from < 1 && Math.floor(to) <= painted) continue;
    painted = Math.floor(to);
    const width = Math.max(1, to - from - (to - from > 3 ? 1 : 0));
    paintSpan(canvas, kindOf(span.what), { left: from, top, width }, ink);
  }
}

interface Bar {
  left: number;
  top: number;
  width: number;
}

function paintSpan(canvas: CanvasRenderingContext2D, kind: Kind, { left, top, width }: Bar, ink: Ink): void {
  const high = ROW - 3;
  canvas.globalAlpha = kind.idle ? 0.35 : 1;
  canvas.fillStyle = kind.color;
  canvas.fillRect(left, top, width, high);
  if (width >= PATTERN_FROM && kind.pattern !== "plain") {
    canvas.fillStyle = patternOf(canvas, kind);
    canvas.fillRect(left, top, width, high);
  }
  canvas.globalAlpha = 1;
  if (width < WORD_FROM) return;
  const wide = canvas.measureText(kind.what).width;
  if (wide + 10 > width) return;
  const at = Math.max(left, 0) + 5;
  if (at + wide > left + width) return;
  canvas.fillStyle = kind.color;
  if (kind.pattern !== "plain" && !kind.idle) canvas.fillRect(at - 2, top + 2, wide + 4, high - 4);
  canvas.fillStyle = kind.idle ? ink.text : isLight(kind.color) ? "#111" : "#fff";
  canvas.fillText(kind.what, at, top + high / 2 + 0.5);
}

/** The path through the lanes: its spans outlined, and from lane to lane a line, which waits below the one before. */
function paintCritical(canvas: CanvasRenderingContext2D, shown: Shown, ink: Ink): void {
  canvas.strokeStyle = ink.critical;
  let before: PlacedSpan | null = null;
  for (const placed of shown.drawing.critical) {
    const isSeen = placed.span.ended_s >= shown.view.from_s && placed.span.started_s <= shown.view.to_s;
    if (isSeen) outline(canvas, shown, placed, ink.critical, 2);
    const isBetween = placed.span.started_s >= shown.view.from_s && (before?.span.ended_s ?? 0) <= shown.view.to_s;
    if (before && before.lane !== placed.lane && isBetween) {
      connect(canvas, shown, before, placed);
    }
    before = placed;
  }
}

function connect(canvas: CanvasRenderingContext2D, shown: Shown, before: PlacedSpan, placed: PlacedSpan): void {
  const from = xOf(before.span.ended_s, shown.view, shown.width);
  const to = Math.max(from, xOf(placed.span.started_s, shown.view, shown.width));
  canvas.lineWidth = 1;
  canvas.beginPath();
  const below = middleOf(shown, before) + (ROW - 3) / 2 + 1;
  canvas.moveTo(from, below);
  canvas.lineTo(to, below);
  canvas.lineTo(to, middleOf(shown, placed));
  canvas.stroke();
}

function outline(canvas: CanvasRenderingContext2D, shown: Shown, placed: PlacedSpan, color: string, line: number): void {
  const from = Math.max(-4, xOf(placed.span.started_s, shown.view, shown.width));
  const to = Math.min(shown.width + 4, xOf(placed.span.ended_s, shown.view, shown.width));
  canvas.strokeStyle = color;
  canvas.lineWidth = line;
  canvas.strokeRect(from, middleOf(shown, placed) - (ROW - 3) / 2, Math.max(1, to - from - 1), ROW - 3);
}

function middleOf(shown: Shown, placed: PlacedSpan): number {
  return (shown.boxes[placed.lane]?.rows ?? 0) + placed.row * ROW + (ROW - 3) / 2;
}

const patterns = new Map<string, CanvasPattern>();

function patternOf(canvas: CanvasRenderingContext2D, kind: Kind): CanvasPattern | string {
  const found = patterns.get(kind.pattern);
  if (found) return found;
  const tile = document.createElement("canvas");
  tile.width = tile.height = 8;
  const pen = tile.getContext("2d");
  if (!pen) return "transparent";
  pen.strokeStyle = pen.fillStyle = "rgba(255, 255, 255, 0.5)";
  pen.lineWidth = 1.5;
  drawTile(pen, kind);
  const made = canvas.createPattern(tile, "repeat");
  if (made) patterns.set(kind.pattern, made);
  return made ?? "transparent";
}

function drawTile(pen: CanvasRenderingContext2D, kind: Kind): void {
  const line = (...[x, y, to_x, to_y]: [number, number, number, number]) => {
    pen.beginPath();
    pen.moveTo(x, y);
    pen.lineTo(to_x, to_y);
    pen.stroke();
  };
  if (kind.pattern === "dots") [2, 6].forEach((at) => pen.fillRect(at, at, 2, 2));
  if (kind.pattern === "rising" || kind.pattern === "crossed") [-8, 0, 8].forEach((x) => line(x, 8, x + 8, 0));
  if (kind.pattern === "falling" || kind.pattern === "crossed") [-8, 0, 8].forEach((x) => line(x, 0, x + 8, 8));
  if (kind.pattern === "upright") line(4, 0, 4, 8);
  if (kind.pattern === "level") line(0, 4, 8, 4);
}

/** By the eye's weights of red, green and blue. */
function isLight(color: string): boolean {
  const part = (at: number) => parseInt(color.slice(at, at + 2), 16);
  return 0.299 * part(1) + 0.587 * part(3) + 0.114 * part(5) > 150;
}
