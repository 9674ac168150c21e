// The one door to the gateway: JSON in and out, every failure typed, every wait with an end.
//
//   ask() ─▶ fetch + key ─▶ 2xx: the record
//                         ├ 4xx/5xx: Refused, the gateway's problem details
//                         └ no answer, or none of ours: Away
import type { ProblemDetails } from "./types";
import { Store } from "./store";

const KEY_AT = "onbeat.key";
const DEADLINE_MS = 15_000;
const LATE_MS = 3_000;
const PROBLEM = "application/problem+json";

/** The gateway answered, and refused: what is wrong, in which field, and the cure. */
export class Refused extends Error {
  constructor(readonly problem: ProblemDetails) {
    super(problem.detail);
  }
}

/** The gateway did not answer, or something else answered in its place. */
export class Away extends Error {}

export const key = new Store<string>(sessionStorage.getItem(KEY_AT) ?? "");
/** Why the key is asked for: "" while the gateway takes the one we have. */
export const keyProblem = new Store<string>(key.value ? "" : "This gateway asks for its key.");

export function useKey(next: string): void {
  sessionStorage.setItem(KEY_AT, next);
  key.set(next);
  keyProblem.set(next ? "" : "This gateway asks for its key.");
}

let offered = "";

/** A key out of an address, which any link may bring: a key that the tab holds stays until the gateway refuses it. */
export function offerKey(next: string): void {
  if (!key.value || keyProblem.value) useKey(next);
  else if (next !== key.value) offered = next;
}

function keyRefused(): void {
  if (offered) {
    useKey(offered);
    offered = "";
  } else keyProblem.set(key.value ? "The gateway refuses this key." : "This gateway asks for its key.");
}

/** Since when the gateway does not answer, in ms of Date.now(); null while it does. */
export const awaySince = new Store<number | null>(null);
/** Since when an answer is waited for that should have come, in ms of Date.now(); null while none is late. */
export const lateSince = new Store<number | null>(null);
/** What the gateway itself can't reach, while it says so. */
export const backendProblem = new Store<ProblemDetails | null>(null);

export function sawAnswer(): void {
  awaySince.set(null);
}

export function sawNone(): void {
  if (awaySince.value === null) awaySince.set(Date.now());
}

export interface RequestOptions {
  body?: unknown;
  headers?: Record<string, string>;
  deadlineMs?: number;
  signal?: AbortSignal;
}

export async function ask<T>(method: string, path: string, options: RequestOptions = {}): Promise<T> {
  const response = await send(method, path, options);
  if (response.status === 204) return undefined as T;
  try {
    return (await response.json()) as T;
  } catch (error) {
    if (options.signal?.aborted) throw error;
    throw new Away("the answer of the gateway broke off");
  }
}

export const get = <T>(path: string, options?: RequestOptions): Promise<T> => ask<T>("GET", path, options);
export const post = <T>(path: string, body?: unknown, options?: RequestOptions): Promise<T> =>
  ask<T>("POST", path, { ...options, body });

/** Answers the response. Throws Refused or Away, and the abort of the caller's own signal. */
export async function send(method: string, path: string, options: RequestOptions = {}): Promise<Response> {
  const deadline = AbortSignal.timeout(options.deadlineMs ?? DEADLINE_MS);
  const signal = options.signal ? AbortSignal.any([options.signal, deadline]) : deadline;
  const headers = keyed(options.headers);
  if (options.body !== undefined) headers["Content-Type"] = "application/json";
  const body = options.body === undefined ? undefined : JSON.stringify(options.body);
  const done = options.deadlineMs ? () => {} : sayWhenLate();
  try {
    return await checked(await reach(path, { method, headers, body, signal }, options.signal));
  } finally {
    done();
  }
}

let numLate = 0;

/** Says that an answer is late until the returned function is called; a request with a deadline of its own may be long. */
function sayWhenLate(): () => void {
  const started = Date.now();
  let isLate = false;
  const timer = setTimeout(() => {
    isLate = true;
    if (numLate++ === 0) lateSince.set(started);
  }, LATE_MS);
  return () => {
    clearTimeout(timer);
    if (isLate && --numLate === 0) lateSince.set(null);
  };
}

function keyed(headers: Record<string, string> = {}): Record<string, string> {
  return key.value ? { ...headers, Authorization: `Bearer ${key.value}` } : { ...headers };
}

/** A fetch whose failures are Away. own: the signal whose abort is the caller's, and goes to it as it is. */
async function reach(path: string, init: RequestInit, own?: AbortSignal): Promise<Response> {
  try {
    return await fetch(path, { ...init, cache: "no-store", redirect: "error", credentials: "omit" });
  } catch (error) {
    if (own?.aborted) throw error;
    sawNone();
    throw new Away("the gateway does not answer");
  }
}

export async function checked(response: Response): Promise<Response> {
  if (response.ok) {
    sawAnswer();
    return response;
  }
  if (response.headers.get("Content-Type") !== PROBLEM) {
    sawNone(); // a proxy in front of it, or another program at its address
    throw new Away(`status ${response.status} did not come from the gateway`);
  }
  sawAnswer();
  const problem = (await response.json()) as ProblemDetails;
  if (response.status === 401) keyRefused();
  throw new Refused(problem);
}

/** One sentence for a person. */
export function words(error: unknown): string {
  if (error instanceof Refused) {
    const { field, detail, cure } = error.problem;
    return `${field ? `${field}: ` : ""}${detail}${cure ? ` — ${cure}` : ""}`;
  }
  return error instanceof Error ? error.message : String(error);
}
