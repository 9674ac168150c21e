// The lanes themselves: a canvas that is dragged, wheeled, pinched, or driven by keys.
//
// Consumes a report; keeps the part of the time that is shown, and the span that is chosen. While the newest time is
// shown, a newer report moves the view along.
import { useCallback, useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import type { TimelineReport } from "../../types";
import { plural } from "../../ui/format";
import { boxesOf, heightOf, hit } from "./geometry";
import type { Shown } from "./geometry";
import { LaneLabels, SpanFacts } from "./facts";
import { keyed } from "./keys";
import { paint } from "./paint";
import type { Ink } from "./paint";
import { drawingOf } from "./rows";
import type { PlacedSpan } from "./rows";
import { useGestures } from "./gestures";
import { followed, isWhole, panned, showing, within, zoomed } from "./view";
import type { View } from "./view";

export function LaneChart({ report }: { report: TimelineReport }) {
  const drawing = useMemo(() => drawingOf(report), [report]);
  const boxes = useMemo(() => boxesOf(drawing), [drawing]);
  const whole: View = drawing;
  const canvas = useRef<HTMLCanvasElement>(null);
  const width = useWidth(canvas);
  const [chosenView, setView] = useState<View | null>(null);
  const [follows, setFollows] = useState(true);
  const [marked, setMarked] = useState<number | null>(null);
  const [chosen, setChosen] = useState<string | null>(null);
  const view = chosenView === null ? whole : follows ? followed(chosenView, whole) : within(chosenView, whole);
  const shown: Shown = { drawing, boxes, view, width };

  const show = useCallback(
    (next: View) => {
      setView(isWhole(next, whole) ? null : next);
      setFollows(next.to_s >= whole.to_s - (next.to_s - next.from_s) * 0.01);
    },
    [whole],
  );
  const marks = useMemo(() => drawing.lanes.flatMap((lane) => lane.spans), [drawing]);
  const selected = useMemo(() => marks.find((placed) => nameOf(placed) === chosen) ?? null, [marks, chosen]);
  const hovered = marked === null ? null : (marks.find((placed) => placed.index === marked) ?? null);
  const pointed = hovered ?? selected;

  const choose = (placed: PlacedSpan | null) => {
    setChosen(placed && nameOf(placed));
    if (placed) show(showing(view, whole, placed.span.started_s, placed.span.ended_s));
  };
  useGestures(canvas, {
    zoom: (factor, share) => show(zoomed(view, whole, factor, share)),
    pan: (share) => show(panned(view, whole, share)),
    point: (x, y) => setMarked(hit(shown, x, y)?.index ?? null),
    leave: () => setMarked(null),
    press: (x, y) => choose(hit(shown, x, y)),
  });
  usePainted(canvas, shown, pointed);

  const onKeyDown = (event: KeyboardEvent) => {
    const done = keyed(event, { drawing, view, whole, selected });
    if (!done) return;
    event.preventDefault();
    if (done.view) show(done.view);
    if (done.selected) choose(done.selected);
  };
  return (
    <div class="lanes">
      <div class="row lanes-tools" role="toolbar" aria-label="Part of the time that is shown" aria-controls="lanes-canvas">
        <button type="button" class="button" onClick={() => show(zoomed(view, whole, 0.5))} aria-label="Zoom in">+</button>
        <button type="button" class="button" onClick={() => show(zoomed(view, whole, 2))} aria-label="Zoom out">−</button>
        <button type="button" class="button" onClick={() => show(panned(view, whole, -0.25))} aria-label="Earlier">←</button>
        <button type="button" class="button" onClick={() => show(panned(view, whole, 0.25))} aria-label="Later">→</button>
        <button type="button" class="button" onClick={() => show(whole)} disabled={chosenView === null}>all of it</button>
      </div>
      <div class="lanes-drawn">
        <LaneLabels drawing={drawing} boxes={boxes} />
        <canvas
          id="lanes-canvas"
          ref={canvas}
          tabIndex={0}
          role="application"
          aria-roledescription="swim lanes"
          aria-label={`${plural(drawing.lanes.length, "lane")} of ${plural(marks.length, "span")}`}
          aria-describedby="lanes-keys"
          style={{ height: `${heightOf(boxes)}px` }}
          onKeyDown={onKeyDown}
        />
      </div>
      {drawing.numLeftOut > 0 && (
        <p class="quiet small">{plural(drawing.numLeftOut, "more lane")} without a part in the critical path: the trace for Perfetto has all.</p>
      )}
      <SpanFacts placed={pointed} zero_s={drawing.from_s} />
      <p class="quiet small" id="lanes-keys">
        Drag or pinch; the wheel zooms with Ctrl, or once the lanes have the focus. Keys: <kbd>←</kbd> <kbd>→</kbd> the
        next span of a lane, <kbd>↑</kbd> <kbd>↓</kbd> another lane, <kbd>+</kbd> <kbd>−</kbd> zoom, with{" "}
        <kbd>Shift</kbd> move, <kbd>C</kbd> along the critical path, <kbd>0</kbd> all of it.
      </p>
    </div>
  );
}

/** Names a span over reports of which each has other indexes. */
function nameOf({ span }: PlacedSpan): string {
  return `${span.who} ${span.what} ${span.started_s}`;
}

function useWidth(canvas: { current: HTMLCanvasElement | null }): number {
  const [width, setWidth] = useState(0);
  useLayoutEffect(() => {
    const element = canvas.current;
    if (!element) return;
    const measure = () => setWidth(element.clientWidth);
    const observer = new ResizeObserver(measure);
    observer.observe(element);
    measure();
    return () => observer.disconnect();
  }, [canvas]);
  return width;
}

/** Paints once a frame at most, and again when the device goes from light to dark. */
function usePainted(canvas: { current: HTMLCanvasElement | null }, shown: Shown, pointed: PlacedSpan | null): void {
  const [theme, setTheme] = useState(0);
  useEffect(() => {
    const dark = matchMedia("(prefers-color-scheme: dark)");
    const turn = () => setTheme((before) => before + 1);
    dark.addEventListener("change", turn);
    return () => dark.removeEventListener("change", turn);
  }, []);
  useLayoutEffect(() => {
    const frame = requestAnimationFrame(() => {
      const element = canvas.current;
      const pen = element?.getContext("2d");
      if (!element || !pen || shown.width === 0) return;
      const scale = window.devicePixelRatio || 1;
      const height = heightOf(shown.boxes);
      const [wide, high] = [Math.round(shown.width * scale), Math.round(height * scale)];
      if (element.width !== wide || element.height !== high) [element.width, element.height] = [wide, high];
      pen.setTransform(scale, 0, 0, scale, 0, 0);
      paint(pen, shown, inkOf(element), pointed);
    });
    return () => cancelAnimationFrame(frame);
  }, [canvas, shown.drawing, shown.width, shown.view.from_s, shown.view.to_s, pointed, theme]);
}

/** The page's own colours, which differ by light and dark. */
function inkOf(element: HTMLElement): Ink {
  const style = getComputedStyle(element);
  const read = (name: string) => style.getPropertyValue(name).trim() || style.color;
  return {
    text: style.color,
    faint: read("--lanes-faint"),
    line: read("--lanes-line"),
    band: read("--lanes-band"),
    critical: read("--lanes-critical"),
  };
}
