// Keeps the text of a new job in this tab through an error, a reload, and a gateway that is away, until it is submitted.
import type { Table } from "./spec_text";
import { START } from "./templates";

const DRAFT = "onbeat.draft";
const EARLIER = "onbeat.draft.earlier";
const SENT = "onbeat.draft.sent";

/** `path` of table `[model]`, as the templates write it. */
const MODEL_PATH = /(\[model\]\s*\n(?:#[^\n]*\n)*path\s*=\s*)"([^"\n]*)"/;

export interface Draft {
  text: string;
  /** Id of the job that the text was taken from. */
  from: string | null;
}

export const FIRST_DRAFT: Draft = { text: START.text, from: null };

/** The first text with a model that the stack has, where it hasn't the one of the text; a text that was typed stays. */
export function fitted(draft: Draft, models: readonly string[]): Draft {
  const [first] = models;
  const named = MODEL_PATH.exec(draft.text);
  if (!first || !named || models.includes(named[2]!)) return draft;
  return { ...draft, text: draft.text.replace(MODEL_PATH, `$1${JSON.stringify(first)}`) };
}

export function readDraft(): Draft | null {
  return read(DRAFT);
}

export function keepDraft(draft: Draft): void {
  sessionStorage.setItem(DRAFT, JSON.stringify(draft));
}

/** The draft that a template, a clone or a fresh start replaced. */
export function readEarlier(): Draft | null {
  return read(EARLIER);
}

export function keepEarlier(draft: Draft | null): void {
  if (draft) sessionStorage.setItem(EARLIER, JSON.stringify(draft));
  else sessionStorage.removeItem(EARLIER);
}

export function forgetDraft(): void {
  for (const name of [DRAFT, EARLIER, SENT]) sessionStorage.removeItem(name);
}

/** The same key for the same spec: a submission whose answer was lost makes no second job when it is sent again. */
export function idempotencyKey(spec: Table): string {
  const body = JSON.stringify(spec);
  const sent = sessionStorage.getItem(SENT);
  const [key, keyBody] = sent ? (JSON.parse(sent) as [string, string]) : ["", ""];
  if (key && keyBody === body) return key;
  const fresh = Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");
  sessionStorage.setItem(SENT, JSON.stringify([fresh, body]));
  return fresh;
}

function read(name: string): Draft | null {
  try {
    const draft = JSON.parse(sessionStorage.getItem(name) ?? "null") as Draft | null;
    return typeof draft?.text === "string" ? draft : null;
  } catch {
    return null;
  }
}
