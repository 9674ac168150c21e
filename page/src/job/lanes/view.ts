// The part of the time that the lanes show, and what zooming and panning make of it.
import { seconds } from "./time";

export interface View {
  from_s: number;
  to_s: number;
}

/** Below this, spans are longer than the drawing, and floats of Unix time begin to lack digits. */
export const SHORTEST_S = 1e-3;

/** A view within the whole, as long as it may be. */
export function within(view: View, whole: View): View {
  const all = Math.max(whole.to_s - whole.from_s, SHORTEST_S);
  const length = Math.min(Math.max(view.to_s - view.from_s, SHORTEST_S), all);
  const from_s = Math.min(Math.max(view.from_s, whole.from_s), whole.from_s + all - length);
  return { from_s, to_s: from_s + length };
}

/** Zooms so that the time at `share` of the width stays where it is. factor below 1 zooms in. */
export function zoomed(view: View, whole: View, factor: number, share = 0.5): View {
  const length = view.to_s - view.from_s;
  const all = Math.max(whole.to_s - whole.from_s, SHORTEST_S);
  const next = Math.min(Math.max(length * factor, SHORTEST_S), all);
  const from_s = view.from_s + (length - next) * share;
  return within({ from_s, to_s: from_s + next }, whole);
}

/** Moves by a share of the view's own length. */
export function panned(view: View, whole: View, share: number): View {
  const by = (view.to_s - view.from_s) * share;
  return within({ from_s: view.from_s + by, to_s: view.to_s + by }, whole);
}

/** Moves no further than is needed to show a span; zooms out for one that is longer than the view. */
export function showing(view: View, whole: View, from_s: number, to_s: number): View {
  const length = view.to_s - view.from_s;
  if (to_s - from_s > length) return within({ from_s, to_s }, whole);
  if (from_s < view.from_s) return within({ from_s, to_s: from_s + length }, whole);
  if (to_s > view.to_s) return within({ from_s: to_s - length, to_s }, whole);
  return view;
}

/** The newest part of a whole that has grown, as long as it was. */
export function followed(view: View, whole: View): View {
  const length = view.to_s - view.from_s;
  return within({ from_s: whole.to_s - length, to_s: whole.to_s }, whole);
}

export function isWhole(view: View, whole: View): boolean {
  return view.to_s - view.from_s >= (whole.to_s - whole.from_s) * 0.999;
}

export interface Tick {
  at_s: number;
  label: string;
}

/** Marks at round seconds since `zero_s`, about as many as asked. */
export function ticksOf(view: View, zero_s: number, about: number): Tick[] {
  const step = roundStep((view.to_s - view.from_s) / Math.max(1, about));
  const first = Math.ceil((view.from_s - zero_s) / step - 1e-9);
  const last = Math.floor((view.to_s - zero_s) / step + 1e-9);
  const ticks: Tick[] = [];
  for (let at = first; at <= last; at += 1) ticks.push({ at_s: zero_s + at * step, label: sinceZero(at * step, step) });
  return ticks;
}

/** 1, 2 or 5 times a power of ten; from a minute on, halves and wholes of minutes and hours. */
function roundStep(raw: number): number {
  const long = [60, 120, 300, 600, 1800, 3600, 7200, 21600, 86400].find((step) => step >= raw);
  if (raw > 30 && long) return long;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].find((times) => times * power >= raw * 0.999) ?? 10;
  return step * power;
}

function sinceZero(at: number, step: number): string {
  if (at === 0) return "0 s";
  if (step >= 60) return seconds(at);
  const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  return `${at.toFixed(digits)} s`;
}
