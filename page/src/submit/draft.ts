// What was typed outlives an error, a reload, and a gateway that is away: it stays in this tab until a job is made of it.
import type { Json } from "./schema";
import { isTable, type Table } from "./schema";

const DRAFT = "onbeat.draft";
const EARLIER = "onbeat.draft.earlier";
const SENT = "onbeat.draft.sent";

export interface Draft {
  spec: Table;
  /** The text as it was typed; null where the form was used last. */
  text: string | null;
  /** Whether the text is no JSON yet; the spec is then the last one that was. */
  broken: boolean;
  /** The job that this was taken from. */
  from: string | null;
}

export const START: Draft = {
  spec: {
    name: "two-digit addition",
    iterations: 30,
    model: { path: "configs/models/two-digit-addition" },
    dataset: { type: "addition" },
    reward: { components: [{ type: "exact" }] },
    rollout: { batches_per_iteration: 4, prompts_per_batch: 8, group_size: 8, sampling: { max_new_tokens: 5 } },
  },
  text: null,
  broken: false,
  from: null,
};

export function readDraft(): Draft | null {
  return read(DRAFT);
}

export function keepDraft(draft: Draft): void {
  sessionStorage.setItem(DRAFT, JSON.stringify(draft));
}

/** The draft that another one took the place of. */
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

/** The same key for the same spec, so that a submission whose answer was lost makes no second job. */
export function idempotencyKey(spec: Json): string {
  const body = JSON.stringify(spec);
  const sent = sessionStorage.getItem(SENT);
  const [key, of] = sent ? (JSON.parse(sent) as [string, string]) : ["", ""];
  if (key && of === body) return key;
  const fresh = Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");
  sessionStorage.setItem(SENT, JSON.stringify([fresh, body]));
  return fresh;
}

function read(name: string): Draft | null {
  try {
    const draft = JSON.parse(sessionStorage.getItem(name) ?? "null") as Draft | null;
    return draft && isTable(draft.spec) ? draft : null;
  } catch {
    return null;
  }
}
