// What a stream report says, in the words and shares that the fence's tab shows.
import type { GeneratorSeen, StreamReport, WindowIteration } from "../../types";
import { number, plural } from "../../ui/format";

export interface OpenIteration {
  iteration: number;
  versions: string;
  lag: string;
  published: number;
  expected: number;
  dead: number;
  /** Of the batches that are expected, each from 0 to 1. */
  publishedShare: number;
  deadShare: number;
}

export function openIteration(one: WindowIteration): OpenIteration {
  const expected = Math.max(0, one.batches_expected);
  const share = (part: number) => (expected ? Math.min(1, part / expected) : 0);
  const [most, least] = [one.iteration - one.oldest_version, one.iteration - one.newest_version];
  return {
    iteration: one.iteration,
    versions: one.oldest_version === one.newest_version ? `${one.newest_version}` : `${one.oldest_version} to ${one.newest_version}`,
    lag: most === 0 ? "none" : most === least ? plural(most, "version") : `${least} to ${most} versions`,
    published: one.batches_published,
    expected,
    dead: one.batches_dead,
    publishedShare: share(one.batches_published),
    deadShare: share(one.batches_dead),
  };
}

/** Most frequent first, then by reason. */
export function byFrequency(counts: Record<string, number>): [string, number][] {
  return Object.entries(counts).sort(([a, many], [b, more]) => more - many || (a < b ? -1 : 1));
}

/** What was counted over the whole job, without what never happened. */
export function totals(report: StreamReport): [string, number][] {
  const all: [string, number][] = [
    ["accepted", report.batches_accepted],
    ["leases expired", report.batches_reclaimed],
    ["leases of dead or hung generators", report.leases_lost],
    ["copies of late batches", report.batches_hedged],
    ["copies that were first", report.hedges_won],
    ["attempts given back", report.batches_failed],
    ["given up", report.batches_dead],
    ["handed out again after a restart of Redis", report.batches_redispatched],
    ["rewinds", report.rewinds],
    ["versions that engines have proved", report.versions_proved],
    ["versions that an engine computes wrongly", report.proofs_far],
    ["versions that an engine has not taken up", report.proofs_stale],
    ["versions of which an engine's numbers are not finite", report.proofs_not_finite],
    ["versions too close to the one before for a check", report.proofs_untold],
  ];
  return all.filter(([name, number]) => number > 0 || name === "accepted");
}

/** A generator beats every few seconds; one that doesn't for so long is in trouble, or dead. */
export const SILENT_S = 4;

export type Presence = "live" | "silent" | "gone";

export interface KnownGenerator {
  seen: GeneratorSeen;
  presence: Presence;
  /** Unix time by this page's clock at which it was found to be gone; null while it is there. */
  gone_s: number | null;
}

/** Gone generators that are still shown: of a stack that restarts for hours only the last ones matter. */
export const MOST_GONE = 8;

/** The generators that answer now, and those that this page saw and that don't any more. */
export function known(before: readonly KnownGenerator[], now: readonly GeneratorSeen[], now_s: number): KnownGenerator[] {
  const here = new Set(now.map((one) => one.worker_id));
  const live = now.map((seen) => ({ seen, presence: presenceOf(seen), gone_s: null }));
  const gone = before
    .filter((one) => !here.has(one.seen.worker_id))
    .map((one): KnownGenerator => ({ ...one, presence: "gone", gone_s: one.gone_s ?? now_s }))
    .sort((a, b) => (b.gone_s ?? 0) - (a.gone_s ?? 0));
  return [...live.sort((a, b) => order(a.seen.worker_id, b.seen.worker_id)), ...gone.slice(0, MOST_GONE)];
}

function presenceOf(seen: GeneratorSeen): Presence {
  return seen.seen_s > SILENT_S ? "silent" : "live";
}

function order(a: string, b: string): number {
  return a.localeCompare(b, "en", { numeric: true });
}

/** What stands in columns of their own, or on the stack's screen. */
const IN_COLUMNS = ["worker_id", "seen_s", "services", "doing", "tokens_per_s", "policy_version", "batches"];

/** What else a generator says of itself, without what it leaves empty. */
export function furtherInfo(seen: GeneratorSeen): [string, string][] {
  return Object.entries(seen)
    .map(([name, value]): [string, string] => [name, inWords(value)])
    .filter(([name, text]) => text !== "" && !IN_COLUMNS.includes(name));
}

function inWords(value: GeneratorSeen[keyof GeneratorSeen]): string {
  if (Array.isArray(value)) return value.join(", ");
  if (value !== null && typeof value === "object") return Object.entries(value).map((pair) => pair.join(": ")).join("; ");
  return `${value ?? ""}`;
}

/** What a generator does, in its own words; one that says nothing is known by the lease that it holds. */
export function doing(seen: GeneratorSeen, batchId: string | undefined): string {
  if (seen.doing) return seen.doing;
  if (seen.loading_weights.length) return `loading ${seen.loading_weights.join(" ")}`;
  return batchId ? `holds ${batchId}` : "waiting";
}

export function versionHeld(seen: GeneratorSeen): string {
  return `${seen.policy_version ?? "none"}`;
}

export function speed(seen: GeneratorSeen): string {
  return seen.tokens_per_s > 0 ? number(Math.round(seen.tokens_per_s)) : "—";
}

/** The fence in one sentence. */
export function fenceInWords(report: StreamReport): string {
  if (!report.fence_state) return "No iteration was opened yet.";
  if (report.fence_state === "closed") return "No iteration is open: the job has ended, or no trainer has begun the next one. No batch can be published.";
  if (report.fence_state !== "open") return `The fence is ${report.fence_state}: no batch can be published.`;
  const waits = report.batches_expected - report.batches_published;
  const left = waits > 0 ? `waits for ${plural(waits, "batch", "batches")}` : "has all its batches";
  const oldest = report.window?.[0]?.iteration ?? report.iteration;
  return `Iteration ${oldest} ${left}.${report.trainer_lease_s === null ? " No trainer holds the job." : ""}`;
}
