// Numbers and times for people. Figures are tabular (base.css), so columns stand still while they change.

/** 0.8123 → "0.812", 12345.6 → "12,346", 1.2e-7 → "1.2e-7". */
export function number(value: number, digits = 3): string {
  if (!Number.isFinite(value)) return String(value);
  const size = Math.abs(value);
  if (size !== 0 && size < 0.5 * 10 ** -digits) return value.toExponential(1);
  const decimals = Number.isInteger(value) || size >= 10_000 ? 0 : size >= 100 ? 1 : size >= 10 ? Math.min(2, digits) : digits;
  return value.toLocaleString("en", { minimumFractionDigits: decimals, maximumFractionDigits: decimals });
}

/** 75.2 → "1 min 15 s". */
export function duration(seconds: number): string {
  const whole = Math.max(0, seconds);
  if (whole < 1) return `${Math.round(whole * 1000)} ms`;
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

export function share(value: number): string {
  return `${(value * 100).toFixed(value < 0.1 && value > 0 ? 1 : 0)} %`;
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
