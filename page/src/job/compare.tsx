// Other jobs beside this one: chosen one by one, and each can go again.
import type { JSX } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { get, key } from "../api";
import { asking } from "../asking";
import { useResource } from "../live";
import { useStore } from "../store";
import type { JobList, JobStatus } from "../types";

const LISTED = 200;
const LIST_EVERY_MS = 15_000;
const STATUS_EVERY_MS = 5_000;
/** More curves than colours with two kinds of line can't be told apart. */
export const MOST_COMPARED = 11;

/** The statuses of some jobs, by id; one that is gone has none. */
export function useStatuses(jobIds: readonly string[]): Map<string, JobStatus> {
  const [statuses, setStatuses] = useState<Map<string, JobStatus>>(new Map());
  const bearer = useStore(key);
  useEffect(() => {
    setStatuses((before) => new Map([...before].filter(([jobId]) => jobIds.includes(jobId))));
    if (!bearer) return;
    const all = jobIds.map((jobId) =>
      asking(async (stop) => {
        const status = await get<JobStatus>(`/v1/jobs/${encodeURIComponent(jobId)}`, { signal: stop });
        if (!stop.aborted) setStatuses((before) => new Map(before).set(jobId, status));
        return STATUS_EVERY_MS;
      }),
    );
    return () => all.forEach((one) => one.stop());
  }, [jobIds.join(" "), bearer]);
  return statuses;
}

/** What stands before a tag where a job's id may stand. */
const TAGGED = "tagged ";

function tagsOf(jobs: readonly JobStatus[]): [tag: string, many: number][] {
  const counts = new Map<string, number>();
  for (const tag of jobs.flatMap(({ tags }) => tags)) counts.set(tag, (counts.get(tag) ?? 0) + 1);
  return [...counts].sort(([a], [b]) => (a < b ? -1 : 1));
}

export interface CompareProps {
  jobId: string;
  otherIds: readonly string[];
  names: (jobId: string) => string;
  onCompare: (otherIds: string[]) => void;
}

export function Compare({ jobId, otherIds, names, onCompare }: CompareProps): JSX.Element {
  const jobs = useResource<JobList>(`/v1/jobs?limit=${LISTED}`, { everyMs: LIST_EVERY_MS }).value?.jobs ?? [];
  const box = useRef<HTMLSelectElement>(null);
  const others = jobs.filter((job) => job.job_id !== jobId && !otherIds.includes(job.job_id));
  const add = (chosen: string): void => {
    if (box.current) box.current.value = "";
    if (!chosen) return;
    const tag = chosen.startsWith(TAGGED) ? chosen.slice(TAGGED.length) : null;
    const more = tag === null ? [chosen] : others.filter(({ tags }) => tags.includes(tag)).map(({ job_id }) => job_id);
    onCompare([...otherIds, ...more].slice(0, MOST_COMPARED));
  };
  return (
    <>
      <select ref={box} aria-label="Compare with another job" value="" disabled={otherIds.length >= MOST_COMPARED} onChange={(event) => add(event.currentTarget.value)}>
        <option value="">Compare with…</option>
        {tagsOf(others).map(([tag, many]) => (
          <option key={tag} value={`${TAGGED}${tag}`}>
            all tagged “{tag}” ({many})
          </option>
        ))}
        {others.map((job) => (
          <option key={job.job_id} value={job.job_id}>
            {job.name} · {job.job_id}
          </option>
        ))}
      </select>
      {otherIds.map((otherId) => (
        <button key={otherId} type="button" class="chip" title={otherId} aria-label={`Compare no more with ${names(otherId)}`} onClick={() => onCompare(otherIds.filter((one) => one !== otherId))}>
          {names(otherId)} ×
        </button>
      ))}
    </>
  );
}
