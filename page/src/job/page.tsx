// One job: its head, and a tab at a time. A tab is a file beside this one.
import type { JSX } from "preact";
import { words } from "../api";
import { useJob } from "../live";
import { link } from "../router";
import { Digest, Empty, StateBadge } from "../ui/parts";
import { Audit } from "./audit";
import { Fence } from "./fence";
import { Lanes } from "./lanes";
import { Overview } from "./overview";
import { Rollouts } from "./rollouts";
import type { TabProps } from "./tab";

const TABS: Record<string, { title: string; view: (props: TabProps) => JSX.Element }> = {
  overview: { title: "Overview", view: Overview },
  lanes: { title: "Lanes", view: Lanes },
  fence: { title: "Fence", view: Fence },
  rollouts: { title: "Rollouts", view: Rollouts },
  audit: { title: "Audit", view: Audit },
};

export function JobPage({ jobId, tab, query }: { jobId: string; tab: string; query: URLSearchParams }): JSX.Element {
  const { status, streams, refused } = useJob(jobId);
  const View = TABS[tab]?.view;
  if (refused && refused.problem.status !== 401)
    return (
      <Empty title="This job can’t be shown">
        <p>{words(refused)}</p>
      </Empty>
    );
  if (!status) return <Empty title="…" />;
  return (
    <>
      <div class="head">
        <div>
          <h1>{status.name}</h1>
          <p class="row quiet small">
            <StateBadge state={status.state} />
            <Digest value={jobId} length={40} />
          </p>
        </div>
      </div>
      <nav class="tabs" aria-label="Parts of the job">
        {Object.entries(TABS).map(([name, { title }]) => (
          <a key={name} href={link(["jobs", jobId, name])} aria-current={name === tab ? "page" : undefined}>
            {title}
          </a>
        ))}
      </nav>
      {View ? (
        <View jobId={jobId} status={status} streams={streams} query={query} />
      ) : (
        <Empty title="There is no such part of a job" />
      )}
    </>
  );
}
