// Hooks over api.ts and sse.ts: what a component shows follows the gateway, and stays as it was while it is away.
import { useCallback, useEffect, useRef, useState } from "preact/hooks";
import { backendProblem, get, key, Refused, words } from "./api";
import { follow } from "./sse";
import { useStore } from "./store";
import type { JobList, JobStatus, ProblemDetails, StreamReport } from "./types";

export interface Resource<T> {
  /** The newest answer, also while a later one is waited for or failed. */
  value: T | null;
  error: unknown;
  problem: string;
  loading: boolean;
  reload: () => void;
}

/** GETs a path, again at every change of `again` and every `everyMs`. A null path asks for nothing. */
export function useResource<T>(path: string | null, options: { everyMs?: number; again?: unknown } = {}): Resource<T> {
  const [value, setValue] = useState<{ path: string; answer: T } | null>(null);
  const [error, setError] = useState<unknown>(null);
  const [loading, setLoading] = useState(false);
  const [turn, setTurn] = useState(0);
  const bearer = useStore(key);
  useEffect(() => {
    if (path === null || !bearer) return;
    const stop = new AbortController();
    setLoading(true);
    get<T>(path, { signal: stop.signal })
      .then((answer) => (setValue({ path, answer }), setError(null)))
      .catch((failed) => stop.signal.aborted || setError(failed))
      .finally(() => stop.signal.aborted || setLoading(false));
    const timer = options.everyMs ? setTimeout(() => setTurn((now) => now + 1), options.everyMs) : undefined;
    return () => {
      stop.abort();
      clearTimeout(timer);
    };
  }, [path, bearer, turn, options.everyMs, options.again]);
  const reload = useCallback(() => setTurn((now) => now + 1), []);
  return {
    value: value && value.path === path ? value.answer : null,
    error,
    problem: error ? words(error) : "",
    loading,
    reload,
  };
}

/** Follows a live stream of whole records; `take` gets each by its event's name. */
export function useLive(path: string | null, take: (name: string, record: unknown) => void): Refused | null {
  const [refused, setRefused] = useState<Refused | null>(null);
  const bearer = useStore(key);
  const taker = useRef(take);
  taker.current = take;
  useEffect(() => {
    setRefused(null);
    if (path === null || !bearer) return;
    const stop = follow(path, {
      onEvent: (event) => {
        const record: unknown = JSON.parse(event.data);
        if (event.name === "problem") {
          const problem = record as ProblemDetails;
          if (problem.status >= 500) backendProblem.set(problem);
          else setRefused(new Refused(problem));
          return;
        }
        backendProblem.set(null);
        taker.current(event.name, record);
      },
      onRefused: setRefused,
    });
    return () => {
      stop();
      backendProblem.set(null);
    };
  }, [path, bearer]);
  return refused;
}

export function useJobs(): JobStatus[] | null {
  const [jobs, setJobs] = useState<JobStatus[] | null>(null);
  useLive("/v1/live", (name, record) => name === "jobs" && setJobs((record as JobList).jobs));
  return jobs;
}

export interface LiveJob {
  status: JobStatus | null;
  streams: StreamReport | null;
  refused: Refused | null;
}

export function useJob(jobId: string): LiveJob {
  const [status, setStatus] = useState<JobStatus | null>(null);
  const [streams, setStreams] = useState<StreamReport | null>(null);
  const refused = useLive(`/v1/jobs/${encodeURIComponent(jobId)}/live`, (name, record) => {
    if (name === "status") setStatus(record as JobStatus);
    if (name === "streams") setStreams(record as StreamReport);
  });
  return { status: status?.job_id === jobId ? status : null, streams: streams?.job_id === jobId ? streams : null, refused };
}

/** The present in seconds, again every so often, for ages. */
export function useNow(everyMs = 1000): number {
  const [now, setNow] = useState(() => Date.now() / 1000);
  useEffect(() => {
    const timer = setInterval(() => setNow(Date.now() / 1000), everyMs);
    return () => clearInterval(timer);
  }, [everyMs]);
  return now;
}
