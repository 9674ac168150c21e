// Walks the points of a chart by keys, and says where one stands in words.
import { number } from "./format";

const PAGE = 10;

export interface Key {
  key: string;
  shiftKey: boolean;
  ctrlKey: boolean;
  metaKey: boolean;
  altKey: boolean;
}

/** Where a key leads from `at`, or from the newest point where one stands nowhere yet: an x of `xs`, which ascend; null
 * leaves the chart. Returns undefined for a key that isn't ours: the browser has it. */
export function walked(event: Key, xs: readonly number[], at: number | null): number | null | undefined {
  if (event.ctrlKey || event.metaKey || event.altKey || event.shiftKey || !xs.length) return undefined;
  const last = xs.length - 1;
  const from = at === null ? last : nearest(xs, at);
  const to = (index: number): number => xs[Math.min(last, Math.max(0, index))] as number;
  switch (event.key) {
    case "ArrowLeft":
      return to(from - 1);
    case "ArrowRight":
      return to(from + 1);
    case "PageDown":
      return to(from - PAGE);
    case "PageUp":
      return to(from + PAGE);
    case "Home":
      return to(0);
    case "End":
      return to(last);
    case "Escape":
      return at === null ? undefined : null;
    default:
      return undefined;
  }
}

/** The index of the x that is nearest to `at`: a point may have gone by a rewind. */
export function nearest(xs: readonly number[], at: number): number {
  let best = 0;
  xs.forEach((x, index) => {
    if (Math.abs(x - at) < Math.abs((xs[best] as number) - at)) best = index;
  });
  return best;
}

interface Named {
  label: string;
  points: readonly (readonly [x: number, y: number])[];
}

/** "iteration 12; Reward: 0.412; other: 0.300": the curves that have a point there. */
export function wordsAt(curves: readonly Named[], x: number, where: (x: number) => string): string {
  const values = curves.flatMap(({ label, points }) => {
    const point = points.find(([pointX]) => pointX === x);
    return point ? [`${label}: ${number(point[1])}`] : [];
  });
  return [where(x), ...values].join("; ");
}
