// Lengths of spans: finer than ages need to be, from microseconds on.
import { duration } from "../../ui/format";

export function seconds(value: number): string {
  const size = Math.abs(value);
  if (size < 1e-3) return `${Math.round(value * 1e6)} µs`;
  if (size < 1) return `${(value * 1e3).toFixed(size < 0.01 ? 1 : 0)} ms`;
  if (size < 60) return `${value.toFixed(size < 10 ? 2 : 1)} s`;
  return duration(value);
}
