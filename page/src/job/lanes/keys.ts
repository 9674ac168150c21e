// What a key does to the lanes.
import type { Drawing, PlacedLane, PlacedSpan } from "./rows";
import { panned, zoomed } from "./view";
import type { View } from "./view";

export interface Before {
  drawing: Drawing;
  view: View;
  whole: View;
  selected: PlacedSpan | null;
}

export interface Done {
  view?: View;
  selected?: PlacedSpan;
}

interface Key {
  key: string;
  shiftKey: boolean;
  ctrlKey: boolean;
  metaKey: boolean;
  altKey: boolean;
}

/** Returns null for a key that isn't ours: the browser has it. */
export function keyed(event: Key, { drawing, view, whole, selected }: Before): Done | null {
  if (event.ctrlKey || event.metaKey || event.altKey) return null;
  const pan = (share: number): Done => ({ view: panned(view, whole, share) });
  switch (event.key) {
    case "+":
    case "=":
      return { view: zoomed(view, whole, 0.5, shareOf(selected, view)) };
    case "-":
    case "_":
      return { view: zoomed(view, whole, 2, shareOf(selected, view)) };
    case "0":
      return { view: whole };
    case "Home":
      return { view: panned(view, whole, -1e9) };
    case "End":
      return { view: panned(view, whole, 1e9) };
    case "ArrowLeft":
      return event.shiftKey ? pan(-0.25) : selecting(inLane(drawing, selected, view, -1));
    case "ArrowRight":
      return event.shiftKey ? pan(0.25) : selecting(inLane(drawing, selected, view, 1));
    case "ArrowUp":
      return selecting(otherLane(drawing, selected, view, -1));
    case "ArrowDown":
      return selecting(otherLane(drawing, selected, view, 1));
    case "c":
    case "C":
      return selecting(onPath(drawing, selected, event.shiftKey ? -1 : 1));
    default:
      return null;
  }
}

function selecting(placed: PlacedSpan | null): Done {
  return placed ? { selected: placed } : {};
}

/** Where the selected span stands in the view: it stays there when its time is zoomed. */
function shareOf(selected: PlacedSpan | null, view: View): number {
  if (!selected) return 0.5;
  const middle = (selected.span.started_s + selected.span.ended_s) / 2;
  return Math.min(1, Math.max(0, (middle - view.from_s) / (view.to_s - view.from_s)));
}

function inLane(drawing: Drawing, selected: PlacedSpan | null, view: View, by: number): PlacedSpan | null {
  if (!selected) return firstSeen(drawing, view);
  const spans = drawing.lanes[selected.lane]?.spans ?? [];
  return spans[spans.indexOf(selected) + by] ?? selected;
}

function otherLane(drawing: Drawing, selected: PlacedSpan | null, view: View, by: number): PlacedSpan | null {
  if (!selected) return firstSeen(drawing, view);
  for (let at = selected.lane + by; drawing.lanes[at]; at += by) {
    const found = nearest(drawing.lanes[at] as PlacedLane, selected.span.started_s);
    if (found) return found;
  }
  return selected;
}

function onPath(drawing: Drawing, selected: PlacedSpan | null, by: number): PlacedSpan | null {
  const at = selected ? drawing.critical.indexOf(selected) : -1;
  if (at >= 0) return drawing.critical[at + by] ?? selected;
  return drawing.critical.find((placed) => !selected || placed.span.ended_s > selected.span.started_s) ?? null;
}

function firstSeen(drawing: Drawing, view: View): PlacedSpan | null {
  for (const lane of drawing.lanes) {
    const found = lane.spans.find((placed) => placed.span.ended_s > view.from_s);
    if (found) return found;
  }
  return null;
}

function nearest(lane: PlacedLane, at_s: number): PlacedSpan | null {
  const away = (placed: PlacedSpan) => Math.abs(placed.span.started_s - at_s);
  return lane.spans.reduce<PlacedSpan | null>((best, one) => (best && away(best) <= away(one) ? best : one), null);
}
