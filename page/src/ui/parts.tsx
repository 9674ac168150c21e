// The small things every screen is made of. Texts of users and models go in as children: Preact makes text nodes.
import type { ComponentChildren, JSX } from "preact";
import { useState } from "preact/hooks";
import { words } from "../api";
import { useNow } from "../live";
import type { JobState, JobStatus } from "../types";
import { age, date, spoken } from "./format";

export const FINAL: readonly JobState[] = ["succeeded", "failed", "cancelled"];

/** The state, and what the job's numbers say is wrong: a job that ended with a collapsed reward is no green one. */
export function StateBadge({ status }: { status: Pick<JobStatus, "state" | "health"> }): JSX.Element {
  const isWell = status.health.length === 0;
  return (
    <>
      <span class={`badge ${isWell || status.state !== "succeeded" ? status.state : "warn"}`}>{status.state}</span>
      {!isWell && (
        <span class="badge warn" title={status.health.map((one) => one.problem).join("; ")}>
          {spoken(status.health[0]!.rule)}
          {status.health.length > 1 && ` +${status.health.length - 1}`}
        </span>
      )}
    </>
  );
}

/** What is wrong since when, what was wrong for a time, and what to do about it; nothing where all is and was well. */
export function Health({ status }: { status: JobStatus }): JSX.Element | null {
  const past = status.health_past ?? [];
  if (!status.health.length && !past.length) return null;
  return (
    <ul class={`note health ${status.health.length ? "warn" : ""}`} role="status">
      {[...status.health, ...past].map((problem) => (
        <li key={`${problem.rule} ${problem.since}`}>
          <strong>{spoken(problem.rule)}</strong>{" "}
          {problem.until === undefined ? `since iteration ${problem.since}` : `from iteration ${problem.since} until ${problem.until}`}
          : {problem.problem} <span class="quiet">— {problem.cure}</span>
        </li>
      ))}
    </ul>
  );
}

/** The beginning of a digest or an id; the whole is its title, and a press copies it. */
export function Digest({ value, length = 12 }: { value: string; length?: number }): JSX.Element {
  const [copied, setCopied] = useState(false);
  const [whole, setWhole] = useState(false);
  if (!value) return <span class="faint">—</span>;
  const copy = async (): Promise<void> => {
    // Without TLS a browser gives no clipboard but at localhost: then the whole is shown, to be marked by hand.
    if (!isSecureContext) return setWhole(true);
    await navigator.clipboard.writeText(value);
    setCopied(true);
    setTimeout(() => setCopied(false), 1200);
  };
  return (
    <button type="button" class="copy" title={value} aria-label={`copy ${value}`} onClick={() => void copy()}>
      {copied ? "copied" : whole ? value : value.slice(0, length)}
    </button>
  );
}

export function Age({ at }: { at: number }): JSX.Element {
  const now = useNow();
  if (!at) return <span class="faint">—</span>;
  return (
    <time class="nowrap" dateTime={new Date(at * 1000).toISOString()} title={date(at)}>
      {age(now - at)}
    </time>
  );
}

export function Progress({ status }: { status: JobStatus }): JSX.Element {
  const done = status.iterations ? status.iterations_committed / status.iterations : 0;
  return (
    <span>
      <span class="nowrap">
        {status.iterations_committed} <span class="faint">of {status.iterations}</span>
      </span>
      <span class="bar" role="presentation">
        <span style={{ width: `${Math.min(100, done * 100)}%` }} />
      </span>
    </span>
  );
}

export function Empty({ title, children }: { title: string; children?: ComponentChildren }): JSX.Element {
  return (
    <div class="empty">
      <h2>{title}</h2>
      {children}
    </div>
  );
}

/** A part of a screen under its own head. */
export function Card({ title, class: name = "", children }: { title: string; class?: string; children: ComponentChildren }): JSX.Element {
  return (
    <section class={`card ${name}`} aria-label={title}>
      <div class="card-head">
        <h2>{title}</h2>
      </div>
      {children}
    </section>
  );
}

/** What went wrong, with its field and cure; nothing while nothing did. */
export function Failure({ error }: { error: unknown }): JSX.Element | null {
  if (!error) return null;
  return (
    <p class="note bad" role="alert">
      {words(error)}
    </p>
  );
}
