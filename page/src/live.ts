// Hooks over api.ts and asking.ts: what a component shows follows the gateway, and stays as it was while it is away.
import { useCallback, useEffect, useRef, useState } from "preact/hooks";
import { get, key, words } from "./api";
import { asking, type Asking } from "./asking";
import { useStore } from "./store";

export interface Resource<T> {
  /** The newest answer, also while a later one is waited for or failed. */
  value: T | null;
  error: unknown;
  problem: string;
  loading: boolean;
  reload: () => void;
}

/** GETs a path, again at every change of `again` and `everyMs` after each answer. A null path asks for nothing. */
export function useResource<T>(path: string | null, options: { everyMs?: number; again?: unknown } = {}): Resource<T> {
  const [value, setValue] = useState<{ path: string; answer: T } | null>(null);
  const [error, setError] = useState<unknown>(null);
  const [loading, setLoading] = useState(false);
  const bearer = useStore(key);
  const restMs = useRef(Infinity);
  restMs.current = options.everyMs ?? Infinity;
  const now = useRef<Asking | null>(null);
  const reload = useCallback(() => now.current?.wake(), []);
  useEffect(() => {
    if (path === null || !bearer) return;
    const started = asking(async (stop) => {
      setLoading(true);
      try {
        const answer = await get<T>(path, { signal: stop });
        if (stop.aborted) return Infinity;
        setValue({ path, answer });
        setError(null);
        return restMs.current;
      } catch (failed) {
        if (!stop.aborted) setError(failed);
        throw failed;
      } finally {
        if (!stop.aborted) setLoading(false);
      }
    });
    now.current = started;
    return () => {
      started.stop();
      now.current = null;
      setError(null);
    };
  }, [path, bearer]);
  // The first look is under way when these are first seen, and a later one is not broken off: it is followed by another.
  const seen = useRef({ path, again: options.again, everyMs: options.everyMs });
  useEffect(() => {
    const before = seen.current;
    seen.current = { path, again: options.again, everyMs: options.everyMs };
    if (before.path === path && (before.again !== options.again || before.everyMs !== options.everyMs)) reload();
  }, [path, options.again, options.everyMs]);
  return {
    value: value && value.path === path ? value.answer : null,
    error,
    problem: error ? words(error) : "",
    loading,
    reload,
  };
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
