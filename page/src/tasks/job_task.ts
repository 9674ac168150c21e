// The newest task of a kind that a job has had, and a way to start another. It is the gateway's: a page that is loaded
// again goes on where it was, and so does one in another window.
import { useEffect, useState } from "preact/hooks";
import { post } from "../api";
import { useResource } from "../live";
import type { TaskKind, TaskList, TaskStatus } from "../types";
import { isOpen } from "./tasks";

const OPEN_EVERY_MS = 1000;
/** Others may start one: the clock, the command line, another window. */
const REST_EVERY_MS = 10_000;

export interface JobTask {
  /** Null before the first answer, and where there was none. */
  task: TaskStatus | null;
  /** Why it can't be started, or looked at. */
  error: unknown;
  isBusy: boolean;
  start: (body?: unknown) => Promise<void>;
  reload: () => void;
}

/** path: what is posted to. */
export function useJobTask(jobId: string, kind: TaskKind, path: string): JobTask {
  const [everyMs, setEveryMs] = useState(REST_EVERY_MS);
  const [refusal, setRefusal] = useState<unknown>(null);
  const [started, setStarted] = useState<TaskStatus | null>(null);
  const [isStarting, setStarting] = useState(false);
  const listed = useResource<TaskList>(`/v1/tasks?${new URLSearchParams({ job_id: jobId, kind, limit: "1" })}`, { everyMs });
  const newest = listed.value?.tasks[0] ?? null;
  // What was just started counts until the list has it, or a newer one.
  const task = started && (!newest || (newest.task_id !== started.task_id && newest.created_s < started.created_s)) ? started : newest;
  const isGoing = task !== null && isOpen(task);
  useEffect(() => setEveryMs(isGoing ? OPEN_EVERY_MS : REST_EVERY_MS), [isGoing]);
  const start = async (body?: unknown): Promise<void> => {
    setStarting(true);
    setRefusal(null);
    try {
      setStarted(await post<TaskStatus>(path, body));
      listed.reload();
    } catch (failed) {
      setRefusal(failed);
    }
    setStarting(false);
  };
  return { task, error: refusal ?? listed.error, isBusy: isStarting || isGoing, start, reload: listed.reload };
}
