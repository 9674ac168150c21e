// Asks the gateway about a spec as one types: POST /v1/jobs/check answers all refusals of it at once.
import { useEffect, useState } from "preact/hooks";
import { key, post, Refused, words } from "../api";
import { asking, type Asking } from "../asking";
import { useStore } from "../store";
import type { ProblemDetails } from "../types";
import type { Table } from "./spec_text";

/** How long the typing rests before the gateway is asked. */
const PAUSE_MS = 500;

/** A field that a submission would be refused for, why, and what to do about it. */
export interface SpecRefusal {
  field: string;
  problem: string;
  cure: string;
}

export type CheckResult =
  | { state: "waiting" }
  | { state: "valid" }
  | { state: "refused"; refusals: readonly SpecRefusal[] }
  /** The gateway gave no verdict: it does not answer, or refuses the key. */
  | { state: "unknown"; reason: string };

/** The refusals of an answer, which has one at least. */
export function refusalsOf(problem: ProblemDetails & { refusals?: SpecRefusal[] }): SpecRefusal[] {
  if (problem.refusals?.length) return problem.refusals;
  return [{ field: problem.field ?? "", problem: problem.detail, cure: problem.cure ?? "" }];
}

/** Whether a refusal is about the spec that was sent; one of the key or of the service is not. */
export function isAboutSpec(problem: ProblemDetails): boolean {
  return problem.status === 400 || problem.status === 422;
}

/** Follows a spec: the newest verdict on it, or "waiting" until there is one. A null spec is not asked about. */
export function useCheck(spec: Table | null): CheckResult {
  const [result, setResult] = useState<CheckResult>({ state: "waiting" });
  const bearer = useStore(key);
  const body = spec && JSON.stringify(spec);
  useEffect(() => {
    setResult({ state: "waiting" });
    if (spec === null || !bearer) return;
    let check: Asking | null = null;
    // Without an answer it is asked again; a refusal is final, until the text is another.
    const start = (): void => {
      check = asking(async (stop) => {
        try {
          await post("/v1/jobs/check", spec, { signal: stop });
          if (!stop.aborted) setResult({ state: "valid" });
          return Infinity;
        } catch (error) {
          if (!stop.aborted) setResult(resultOf(error));
          throw error;
        }
      });
    };
    const timer = setTimeout(start, PAUSE_MS);
    return () => {
      clearTimeout(timer);
      check?.stop();
    };
  }, [body, bearer]);
  return result;
}

export function resultOf(error: unknown): CheckResult {
  if (error instanceof Refused && isAboutSpec(error.problem)) return { state: "refused", refusals: refusalsOf(error.problem) };
  return { state: "unknown", reason: words(error) };
}
