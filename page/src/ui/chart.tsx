// Curves by uPlot, in the page's colours, with one cursor for all of a screen: the mouse moves it, or the keys.
import type { JSX } from "preact";
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";
import { number, ticks } from "./format";
import { walked, wordsAt } from "./walk";

export interface Curve {
  label: string;
  /** A token of tokens.css: "--c1". */
  colour: string;
  points: readonly (readonly [x: number, y: number])[];
  dashed?: boolean;
  /** Drawn thin and pale, beneath: what a smoothed curve is made of. */
  raw?: boolean;
  dots?: boolean;
}

/** A vertical line. */
export interface Mark {
  x: number;
}

export interface AxisOfX {
  name: string;
  /** Distances that two labels may have. */
  steps: number[];
  label: (x: number, step: number) => string;
  /** Where one stands: "iteration 12". */
  words: (x: number) => string;
}

export interface ChartProps {
  title: string;
  curves: Curve[];
  x: AxisOfX;
  isLog?: boolean;
  /** Whether more points between these are on their way. */
  isBusy?: boolean;
  marks?: Mark[];
  /** Gets the plot, to be saved as a picture. */
  plot: { current: uPlot | null };
  height?: number;
  /** The last x that the axis shows, also where these curves have no point. */
  lastX?: number;
  /** Charts of one group show the cursor at the same place. */
  group: string;
  onHover?: (x: number | null) => void;
}

export function Chart({ title, curves, x, isLog = false, isBusy = false, marks = [], plot, height = 190, lastX = 0, group, onHover }: ChartProps): JSX.Element {
  const box = useRef<HTMLDivElement>(null);
  const hover = useRef(onHover);
  hover.current = onHover;
  const shape = JSON.stringify(curves.map(({ label, colour, dashed, raw, dots }) => [label, colour, dashed, raw, dots]));
  const data = useMemo(() => table(curves, isLog), [curves, isLog]);
  const marked = useRef(marks);
  marked.current = marks;
  const end = useRef(lastX);
  end.current = lastX;
  const latest = useRef(data);
  latest.current = data;
  const [at, setAt] = useState<number | null>(null);
  const stood = useRef(at);
  stood.current = at;
  const tells = useRef(false);
  // The group's other charts have their points elsewhere: the one with the mouse or the keys tells where one stands.
  const tell = (at: number | null): void => {
    if (at === null ? !tells.current : stood.current === null && !box.current?.matches(":hover")) return;
    tells.current = at !== null;
    hover.current?.(at);
  };
  useEffect(() => {
    const element = box.current;
    if (!element) return;
    const scheme = matchMedia("(prefers-color-scheme: dark)");
    const make = (): void => {
      plot.current?.destroy();
      const options = optionsOf(curves, {
        width: element.clientWidth,
        height,
        group,
        x,
        isLog,
        lastX: () => end.current,
        marks: () => marked.current,
        onHover: tell,
        onReady: (ready) => stood.current !== null && pointed(ready, stood.current),
      });
      plot.current = new uPlot(options, latest.current, element);
    };
    make();
    const resized = new ResizeObserver(() => plot.current?.setSize({ width: element.clientWidth, height }));
    resized.observe(element);
    scheme.addEventListener("change", make);
    return () => {
      resized.disconnect();
      scheme.removeEventListener("change", make);
      plot.current?.destroy();
      plot.current = null;
    };
  }, [shape, height, group, x.name, isLog]);
  useEffect(() => {
    // At once: what the keys chose stays under the cursor where the axis has grown.
    plot.current?.batch((now: uPlot) => now.setData(data));
    if (stood.current !== null) pointed(plot.current, stood.current);
  }, [data, lastX, marks]);

  const stand = (next: number | null): void => {
    stood.current = next;
    setAt(next);
    pointed(plot.current, next);
  };
  const step = (event: KeyboardEvent): void => {
    const now = plot.current;
    if (!now) return;
    const next = walked(event, seen(now), at ?? under(now));
    if (next === undefined) return;
    event.preventDefault();
    stand(next);
  };
  const xs = data[0];
  if (!xs.length) return <div class="chart" ref={box} role="img" aria-label={spoken(title, curves, x)} />;
  const shown = at ?? (xs[xs.length - 1] as number);
  return (
    <div
      class="chart"
      ref={box}
      role="slider"
      tabIndex={0}
      aria-label={spoken(title, curves, x)}
      aria-busy={isBusy}
      aria-valuemin={xs[0]}
      aria-valuemax={xs[xs.length - 1]}
      aria-valuenow={shown}
      aria-valuetext={wordsAt(curves, shown, x.words)}
      onKeyDown={step}
      onBlur={() => at !== null && stand(null)}
      onPointerMove={() => at !== null && setAt(null)}
    />
  );
}

/** Puts the cursor of all charts of the group at an x; null takes it away. */
function pointed(plot: uPlot | null, x: number | null): void {
  if (!plot) return;
  const to = x === null ? { left: -10, top: -10 } : { left: plot.valToPos(x, "x"), top: 0 };
  // uPlot's types don't have the third argument: whether the group's other charts follow.
  (plot.setCursor as (to: { left: number; top: number }, fire: boolean, share: boolean) => void)(to, true, true);
}

/** The points that are drawn: all, or those of the part that was dragged open. */
function seen(plot: uPlot): number[] {
  const { min = -Infinity, max = Infinity } = plot.scales.x ?? {};
  return [...plot.data[0]].filter((x) => x >= min && x <= max);
}

/** The x under the mouse. */
function under(plot: uPlot): number | null {
  return plot.cursor.idx == null ? null : (plot.data[0][plot.cursor.idx] ?? null);
}

function spoken(title: string, curves: Curve[], x: AxisOfX): string {
  const at = (place: number): string => (x.name === "iterations" ? String(place) : x.words(place));
  const ends = curves
    .filter((curve) => !curve.raw && curve.points.length)
    .map(({ label, points }) => {
      const [first, last] = [points[0]!, points[points.length - 1]!];
      return `${label}: ${number(first[1])} at ${at(first[0])}, ${number(last[1])} at ${at(last[0])}`;
    });
  return `${title}. ${ends.join("; ") || "nothing yet"}`;
}

/** One row of x for all curves; a curve has null where it has no point, and no logarithm. */
function table(curves: Curve[], isLog: boolean): uPlot.AlignedData {
  const drawn = (y: number | null): number | null => (isLog && y !== null && y <= 0 ? null : y);
  const xs = sharedXs(curves);
  if (xs) return [xs, ...curves.map((curve) => curve.points.map(([, y]) => drawn(y)))] as uPlot.AlignedData;
  const all = [...new Set(curves.flatMap((curve) => curve.points.map(([x]) => x)))].sort((a, b) => a - b);
  const ys = curves.map((curve) => {
    const at = new Map(curve.points);
    return all.map((x) => drawn(at.get(x) ?? null));
  });
  return [all, ...ys] as uPlot.AlignedData;
}

/** The xs of all curves, where they are the same: of one job they mostly are, and it may be long. */
function sharedXs(curves: Curve[]): number[] | null {
  const [first, ...others] = curves;
  if (!first) return [];
  const isShared = others.every(({ points }) => points.length === first.points.length && points.every(([x], place) => x === first.points[place]![0]));
  return isShared ? first.points.map(([x]) => x) : null;
}

interface Given {
  width: number;
  height: number;
  group: string;
  x: AxisOfX;
  isLog: boolean;
  lastX: () => number;
  marks: () => readonly Mark[];
  onHover: (x: number | null) => void;
  onReady: (plot: uPlot) => unknown;
}

function optionsOf(curves: Curve[], { width, height, group, x, isLog, lastX, marks, onHover, onReady }: Given): uPlot.Options {
  const style = getComputedStyle(document.documentElement);
  const token = (name: string): string => style.getPropertyValue(name).trim();
  const axis: uPlot.Axis = {
    stroke: token("--text-3"),
    font: `11px ${token("--font")}`,
    grid: { stroke: token("--line"), width: 1 },
    ticks: { show: false },
    gap: 6,
  };
  return {
    width,
    height,
    padding: [10, 16, 0, 0],
    legend: { show: false },
    cursor: {
      y: false,
      drag: { x: true, y: false },
      points: { size: 7 },
      sync: { key: group, setSeries: false },
    },
    scales: { x: { time: false, range: (_, low, high) => [low ?? 0, Math.max(high ?? 1, lastX(), (low ?? 0) + 1)] }, y: isLog ? { distr: 3, log: 10 } : { range: room } },
    axes: [
      { ...axis, grid: { show: false }, size: 26, space: 60, incrs: x.steps, values: (_, splits) => splits.map((at) => x.label(at, Math.abs((splits[1] ?? at) - (splits[0] ?? 0)))) },
      { ...axis, size: (_, values) => 14 + 6.4 * Math.max(3, ...(values ?? []).map((value) => value.length)), space: 34, values: (_, splits) => (isLog ? splits.map((at) => (at === null ? "" : number(at))) : ticks(splits)) },
    ],
    series: [{}, ...curves.map((curve) => seriesOf(curve, token(curve.colour)))],
    hooks: {
      setCursor: [(self) => onHover(under(self))],
      ready: [onReady],
      drawAxes: [(self) => marks().forEach((mark) => line(self, mark.x, token("--warn")))],
    },
  };
}

/** A dotted line from the top to the bottom, beneath the curves. */
function line(plot: uPlot, x: number, colour: string): void {
  const { ctx, bbox } = plot;
  const at = Math.round(plot.valToPos(x, "x", true));
  if (at < bbox.left || at > bbox.left + bbox.width) return;
  ctx.save();
  ctx.strokeStyle = colour;
  ctx.lineWidth = devicePixelRatio || 1;
  ctx.setLineDash([2 * ctx.lineWidth, 3 * ctx.lineWidth]);
  ctx.beginPath();
  ctx.moveTo(at, bbox.top);
  ctx.lineTo(at, bbox.top + bbox.height);
  ctx.stroke();
  ctx.restore();
}

function seriesOf(curve: Curve, colour: string): uPlot.Series {
  const series: uPlot.Series = {
    label: curve.label,
    stroke: curve.raw ? `color-mix(in srgb, ${colour} 28%, transparent)` : colour,
    width: curve.raw ? 1 : 1.75,
    spanGaps: true,
    points: { show: curve.dots ?? false, size: 5, fill: colour, stroke: colour },
  };
  return curve.dashed ? { ...series, dash: [5, 4] } : series;
}

/** The y axis from the lowest to the highest, with a little air; a flat curve lies in the middle. */
function room(_: uPlot, low: number | null, high: number | null): [number, number] {
  if (low === null || high === null) return [0, 1];
  const span = high - low || Math.abs(high) || 1;
  return [low >= 0 && low < span * 0.5 ? 0 : low - span * 0.06, high + span * 0.06];
}
