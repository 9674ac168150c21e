// Numbers and times for people. Figures are tabular (base.css), so columns stand still while they change.

/** Three significant digits, or as many as are asked for, as onbeat/terminal/words.py has them: 0.812, 12.3, 5.2e-4, 12,346. */
export function number(value: number, digits = 3): string {
  if (!Number.isFinite(value)) return String(value);
  const size = Math.abs(value);
  if (size >= 1e15 || (size > 0 && size < 0.0009995)) {
    const [mantissa, exponent] = value.toExponential(digits - 1).split("e");
    return `${Number(mantissa)}e${Number(exponent)}`;
  }
  if (Number.isInteger(value) || size >= 10 ** digits - 0.5) return value.toLocaleString("en", { maximumFractionDigits: 0 });
  const text = value.toPrecision(digits);
  return size >= 0.1 ? text : String(Number(text));
}

/** 75.2 → "1 min 15 s", 0.042 → "42 ms". */
export function duration(seconds: number): string {
  const whole = Math.max(0, seconds);
  if (whole < 0.95) return `${Number((whole * 1000).toPrecision(3))} ms`;
  if (whole < 10) return `${whole.toFixed(1)} s`;
  if (whole < 60) return `${Math.floor(whole)} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${Math.floor(whole % 60)} s`;
  if (whole < 86_400) return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
  return `${Math.floor(whole / 86_400)} d ${Math.floor((whole % 86_400) / 3600)} h`;
}

/** 75.2 → "1 min ago", for a time that is told every second. */
export function age(seconds: number): string {
  if (seconds < 2) return "now";
  if (seconds < 60) return `${Math.floor(seconds)} s ago`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ago`;
  if (seconds < 86_400) return `${Math.floor(seconds / 3600)} h ago`;
  return `${Math.floor(seconds / 86_400)} d ago`;
}

export function bytes(size: number): string {
  const units = ["B", "KB", "MB", "GB", "TB"];
  let unit = 0;
  let value = size;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${unit === 0 || value >= 100 ? Math.round(value) : value.toFixed(1)} ${units[unit]}`;
}

/** 0.9312 → "93.1 %", 0.0002 → "0.02 %". */
export function share(value: number): string {
  return `${Number((value * 100).toPrecision(3))} %`;
}

export function clock(unixSeconds: number): string {
  return new Date(unixSeconds * 1000).toLocaleTimeString("en-GB");
}

export function date(unixSeconds: number): string {
  return new Date(unixSeconds * 1000).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "medium" });
}

export function plural(many: number, one: string, more = `${one}s`): string {
  return `${many.toLocaleString("en")} ${many === 1 ? one : more}`;
}

const UPPER = /\b(kl|mfu|k1|k2|k3|mcp|llm|id)\b/g;

/** "num_batches" → "batches", "step_s" → "step, s", "trained_tokens_per_s" → "trained tokens / s" */
export function spoken(name: string): string {
  const plain = name.replace(/^num_/, "").replace(/_per_s$/, " / s").replace(/_(s|ms|bytes)$/, ", $1");
  return plain.replaceAll("_", " ").replace(UPPER, (word) => word.toUpperCase());
}

/** 75.2 → "1 min": as exact as a guess is. */
export function roughly(seconds: number): string {
  if (seconds < 60) return "less than a minute";
  if (seconds < 3600) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172_800) return `${(seconds / 3600).toFixed(1)} h`;
  return `${Math.round(seconds / 86_400)} d`;
}

/** Labels of an axis, with as many decimals as its steps have: quarters are 0.25, 0.50, 0.75. */
export function ticks(splits: readonly number[]): string[] {
  const step = Math.abs((splits[1] ?? 1) - (splits[0] ?? 0)) || 1;
  const largest = Math.max(...splits.map(Math.abs));
  const decimals = decimalsOf(step);
  if (largest >= 1e6 || decimals > 4) return splits.map((value) => (value === 0 ? "0" : value.toExponential(decimalsOf(step / 10 ** exponentOf(largest))).replace("e+", "e")));
  if (largest >= 1e4 && step >= 1000) return splits.map((value) => (value === 0 ? "0" : `${value / 1000}k`));
  return splits.map((value) => value.toFixed(decimals));
}

/** 0.25 → 2, 0.1 → 1, 20 → 0. */
function decimalsOf(step: number): number {
  for (let decimals = 0; decimals < 15; decimals += 1) {
    const scaled = step * 10 ** decimals;
    if (Math.abs(scaled - Math.round(scaled)) < 1e-6 * scaled) return decimals;
  }
  return 15;
}

function exponentOf(value: number): number {
  return value > 0 ? Math.floor(Math.log10(value)) : 0;
}

/** ` --run-dir DIR` for a command that is copied into a shell of the gateway’s host; "" where the gateway names no folder. */
export function stackFlag(directory: string): string {
  if (!directory) return "";
  const plain = /^[\w./+-]+$/.test(directory);
  return ` --run-dir ${plain ? directory : `'${directory.replaceAll("'", `'\\''`)}'`}`;
}
