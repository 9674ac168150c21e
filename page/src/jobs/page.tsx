// All jobs, the newest first, as they change. The filter stands in the address, so that it can be sent and reloaded.
import type { JSX } from "preact";
import { useEffect, useState } from "preact/hooks";
import { useNow, useResource } from "../live";
import { go, link } from "../router";
import type { EvaluationScore, JobList, JobState, JobStatus } from "../types";
import { riseOf } from "./rise";
import { bytes, number, plural, roughly } from "../ui/format";
import { Age, Digest, Empty, Failure, Progress, StateBadge } from "../ui/parts";
import { JobActions } from "./actions";

const STATES: readonly JobState[] = ["running", "queued", "cancelling", "succeeded", "failed", "cancelled"];
const NUM_NEWEST = 100;
const EVERY_MS = 1500;
const MAX_LISTED = 1000;

interface Chosen {
  name?: string;
  states?: JobState[];
  tag?: string;
}

export function JobsPage({ query }: { query: URLSearchParams }): JSX.Element {
  const newest = useResource<JobList>(`/v1/jobs?limit=${NUM_NEWEST}`, { everyMs: EVERY_MS });
  const live = newest.value?.jobs;
  const [gone, setGone] = useState<string[]>([]);
  const name = query.get("name") ?? "";
  const tag = query.get("tag") ?? "";
  const states = (query.get("state") ?? "").split(",").filter((state): state is JobState => STATES.includes(state as JobState));
  const filter = (next: Chosen): void =>
    go(["jobs"], { name: next.name ?? name, state: (next.states ?? states).join(","), tag: next.tag ?? tag });
  // The newest hundred are asked for often; of more, the gateway itself looks through the rest.
  const filters = new URLSearchParams([["limit", String(MAX_LISTED)], ...states.map((state) => ["state", state]), ...(name ? [["name", name]] : [])]);
  const more = (live?.length ?? 0) >= NUM_NEWEST && (states.length > 0 || name !== "" || tag !== "");
  const older = useResource<JobList>(more ? `/v1/jobs?${filters}` : null, { everyMs: 5000 });
  const known = new Set(live?.map((job) => job.job_id));
  const all = [...(live ?? []), ...(older.value?.jobs.filter((job) => !known.has(job.job_id)) ?? [])];
  const shown = all.filter((job) => !gone.includes(job.job_id) && matches(job, name, states) && (!tag || job.tags.includes(tag)));
  return (
    <>
      <div class="head">
        <h1>Jobs</h1>
        <a class="button primary" href={link(["new"])}>
          New job
        </a>
      </div>
      <Filter name={name} states={states} tag={tag} counts={counted(all)} onFilter={filter} />
      <Failure error={older.error} />
      {!live ? (
        <Empty title="Waiting for the gateway" />
      ) : shown.length ? (
        <section class="card jobs">
          <JobTable jobs={shown} onDone={newest.reload} onDeleted={(jobId) => setGone((before) => [...before, jobId])} />
        </section>
      ) : all.length ? (
        <Empty title="No job matches">
          <a href={link(["jobs"])}>Show all {plural(all.length, "job")}</a>
        </Empty>
      ) : (
        <Empty title="No jobs yet">
          <p>
            <a href={link(["new"])}>Submit one here</a>, or by <code>onbeat submit SPEC</code>.
          </p>
        </Empty>
      )}
    </>
  );
}

function matches(job: JobStatus, name: string, states: readonly JobState[]): boolean {
  return (!states.length || states.includes(job.state)) && job.name.includes(name);
}

function counted(jobs: readonly JobStatus[]): Map<JobState, number> {
  const counts = new Map<JobState, number>();
  for (const job of jobs) counts.set(job.state, (counts.get(job.state) ?? 0) + 1);
  return counts;
}

function Filter(props: { name: string; states: readonly JobState[]; counts: Map<JobState, number>; tag: string; onFilter: (next: Chosen) => void }): JSX.Element {
  const { name, states, tag, counts, onFilter } = props;
  const [typed, setTyped] = useState(name);
  useEffect(() => setTyped(name), [name]);
  useEffect(() => {
    if (typed === name) return;
    const timer = setTimeout(() => onFilter({ name: typed }), 200);
    return () => clearTimeout(timer);
  }, [typed]);
  const toggle = (state: JobState): void =>
    onFilter({ states: states.includes(state) ? states.filter((one) => one !== state) : [...states, state] });
  return (
    <div class="row filter">
      <input type="search" aria-label="Filter by name" placeholder="Filter by name" value={typed} onInput={(event) => setTyped(event.currentTarget.value)} />
      <div class="row chips" role="group" aria-label="Filter by state">
        {STATES.filter((state) => counts.has(state) || states.includes(state)).map((state) => (
          <button key={state} type="button" class="chip" aria-pressed={states.includes(state)} onClick={() => toggle(state)}>
            {state} <span class="faint">{counts.get(state) ?? 0}</span>
          </button>
        ))}
        {tag && (
          <button type="button" class="chip" aria-pressed={true} aria-label={`Show others than those tagged ${tag}`} onClick={() => onFilter({ tag: "" })}>
            {tag} ×
          </button>
        )}
      </div>
    </div>
  );
}

function JobTable({ jobs, onDone, onDeleted }: { jobs: JobStatus[]; onDone: () => void; onDeleted: (jobId: string) => void }): JSX.Element {
  return (
    <table>
      <thead>
        <tr>
          <th>Job</th>
          <th>State</th>
          <th>Iterations</th>
          <th class="num">Held-out</th>
          <th>Weights</th>
          <th class="num">Disk</th>
          <th class="num">Created</th>
          <th>
            <span class="unseen">Actions</span>
          </th>
        </tr>
      </thead>
      <tbody>
        {jobs.map((job) => (
          <tr key={job.job_id}>
            <td class="of-name">
              <a href={link(["jobs", job.job_id])}>{job.name}</a>
              <p class="small job-id">
                <Digest value={job.job_id} length={40} />
                {job.tags.map((tag) => (
                  <a key={tag} class="tag" href={link(["jobs"], { tag })}>
                    {tag}
                  </a>
                ))}
              </p>
              {job.reason && <p class={`reason small ${job.state === "failed" ? "bad" : "quiet"}`}>{job.reason}</p>}
            </td>
            <td class="of-state">
              <StateBadge status={job} />
            </td>
            <td class="of-progress" data-head="Iterations">
              <Progress status={job} />
              <Left job={job} />
            </td>
            <td class="num of-score" data-head="Held-out">
              <HeldOut before={job.evaluation_before} latest={job.evaluation_latest} />
            </td>
            <td class="of-digest small quiet" data-head="Weights">
              <Digest value={job.weights_digest} length={8} />
            </td>
            <td class="num of-disk small quiet" data-head="Disk">
              {job.disk_bytes === null ? "—" : bytes(job.disk_bytes)}
            </td>
            <td class="num of-age quiet" data-head="Created">
              <Age at={job.created_s} />
            </td>
            <td class="of-actions">
              <JobActions job={job} little onDone={onDone} onDeleted={() => onDeleted(job.job_id)} />
            </td>
          </tr>
        ))}
      </tbody>
    </table>
  );
}

export function HeldOut({ before, latest }: { before: EvaluationScore | null; latest: EvaluationScore | null }): JSX.Element {
  if (!latest) return <span class="faint">—</span>;
  const rise = riseOf(before, latest);
  const error = typeof latest.sampled_error === "number" ? ` ± ${number(latest.sampled_error)}` : "";
  const within = rise && !rise.tone ? "; the change is within the standard error" : "";
  return (
    <span class="nowrap" title={`mean reward of ${plural(latest.num_prompts, "held-out prompt")}${error}${within}`}>
      {number(latest.sampled)}
      {rise !== null && (
        <span class={`rise small ${rise.tone}`}>
          {` ${rise.change >= 0 ? "+" : "−"}${number(Math.abs(rise.change))}`}
          {rise.error !== null && ` ± ${number(rise.error)}`}
        </span>
      )}
    </span>
  );
}

/** How long a running job may still take, at its pace since its first trainer. */
export function Left({ job }: { job: JobStatus }): JSX.Element | null {
  const now = useNow(5000);
  const done = job.iterations_committed;
  if (job.state !== "running" || done < 3 || !job.started_s) return null;
  const left_s = ((now - job.started_s) / done) * (job.iterations - done);
  return <span class="left faint small">{roughly(left_s)} left</span>;
}
