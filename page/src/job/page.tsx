// One job: its head, and a tab at a time. A tab is a file beside this one.
import type { ComponentChildren, JSX } from "preact";
import { useEffect, useState } from "preact/hooks";
import { Refused, words } from "../api";
import { JobActions } from "../jobs/actions";
import { HeldOut, Left } from "../jobs/page";
import { useNow, useResource } from "../live";
import { go, link } from "../router";
import type { JobStatus } from "../types";
import { date, duration } from "../ui/format";
import { Guard } from "../ui/guard";
import { Digest, Empty, Health, Progress, StateBadge } from "../ui/parts";
import { Audit } from "./audit";
import { Fence } from "./fence";
import { Lanes } from "./lanes";
import { Log } from "./log";
import { Overview } from "./overview";
import { Rollouts } from "./rollouts";
import { isFinal } from "./series";
import { Spec } from "./spec";
import type { TabProps } from "./tab";

const EVERY_MS = 1000;
/** It may be resumed. */
const ENDED_EVERY_MS = 5000;

/** In the order in which a researcher asks: does it learn, what does it write, what went wrong; then how the stack does. */
const TABS: Record<string, { title: string; view: (props: TabProps) => JSX.Element }> = {
  overview: { title: "Overview", view: Overview },
  rollouts: { title: "Rollouts", view: Rollouts },
  log: { title: "Log", view: Log },
  spec: { title: "Spec", view: Spec },
  lanes: { title: "Lanes", view: Lanes },
  fence: { title: "Fence", view: Fence },
  audit: { title: "Audit", view: Audit },
};

export function JobPage({ jobId, tab, query }: { jobId: string; tab: string; query: URLSearchParams }): JSX.Element {
  const [everyMs, setEveryMs] = useState(EVERY_MS);
  const job = useResource<JobStatus>(`/v1/jobs/${encodeURIComponent(jobId)}`, { everyMs });
  const status = job.value;
  const isEnded = status !== null && isFinal(status.state);
  useEffect(() => setEveryMs(isEnded ? ENDED_EVERY_MS : EVERY_MS), [isEnded]);
  const shown = Object.hasOwn(TABS, tab) ? TABS[tab] : undefined;
  const { error } = job;
  if (error instanceof Refused && error.problem.status !== 401 && error.problem.status < 500)
    return (
      <Empty title="This job can’t be shown">
        <p>{words(error)}</p>
      </Empty>
    );
  if (!status) return <Empty title="Waiting for the gateway" />;
  return (
    <>
      <Head status={status} onDone={job.reload} />
      <nav class="tabs" aria-label="Parts of the job">
        {Object.entries(TABS).map(([name, { title }]) => (
          <a key={name} href={link(["jobs", jobId, name])} aria-current={name === tab ? "page" : undefined}>
            {title}
          </a>
        ))}
      </nav>
      {shown ? (
        <Guard key={tab} name={shown.title}>
          <shown.view jobId={jobId} status={status} query={query} />
        </Guard>
      ) : (
        <Empty title="There is no such part of a job" />
      )}
    </>
  );
}

function Head({ status, onDone }: { status: JobStatus; onDone: () => void }): JSX.Element {
  return (
    <div class="job-top">
      <div class="head job-head">
        <div>
          <p class="small">
            <a class="quiet" href={link(["jobs"])}>
              ← Jobs
            </a>
          </p>
          <h1>{status.name}</h1>
          <p class="row small quiet">
            <StateBadge status={status} />
            <Digest value={status.job_id} length={40} />
            {status.tags.map((tag) => (
              <a key={tag} class="tag" href={link(["jobs"], { tag })}>
                {tag}
              </a>
            ))}
          </p>
        </div>
        <JobActions job={status} onDone={onDone} onDeleted={() => go(["jobs"])} />
      </div>
      {status.reason && <p class={`note ${status.state === "failed" ? "bad" : ""}`}>{status.reason}</p>}
      <Health status={status} />
      <dl class="facts job-facts">
        <Fact title="Iterations">
          <Progress status={status} />
          <Left job={status} />
        </Fact>
        <Fact title="Held-out reward">
          <HeldOut before={status.evaluation_before} latest={status.evaluation_latest} />
        </Fact>
        <Fact title="Policy version">{status.policy_version}</Fact>
        <Fact title="Weights digest">
          <Digest value={status.weights_digest} length={10} />
        </Fact>
        <Fact title="Schedule">
          {status.schedule}
          {status.max_policy_lag > 0 && <span class="faint small"> lag up to {status.max_policy_lag}</span>}
        </Fact>
        <Fact title={status.ended_s ? "Took" : "Runs for"}>
          <Took status={status} />
        </Fact>
      </dl>
    </div>
  );
}

function Fact({ title, children }: { title: string; children: ComponentChildren }): JSX.Element {
  return (
    <div>
      <dt>{title}</dt>
      <dd>{children}</dd>
    </div>
  );
}

function Took({ status }: { status: JobStatus }): JSX.Element {
  const now = useNow();
  if (!status.started_s) return <span class="faint">not begun</span>;
  return <span title={date(status.started_s)}>{duration((status.ended_s || now) - status.started_s)}</span>;
}
