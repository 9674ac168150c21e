// All jobs, the newest first, as they change.
import type { JSX } from "preact";
import { useJobs } from "../live";
import { link } from "../router";
import type { JobStatus } from "../types";
import { Age, Digest, Empty, Progress, StateBadge } from "../ui/parts";

export function JobsPage(_: { query: URLSearchParams }): JSX.Element {
  const jobs = useJobs();
  if (jobs?.length === 0) return <Empty title="No jobs yet" />;
  return (
    <section class="card">
      <div class="table-box">
        <table>
          <tbody>{jobs?.map((job) => <Row key={job.job_id} job={job} />)}</tbody>
        </table>
      </div>
    </section>
  );
}

function Row({ job }: { job: JobStatus }): JSX.Element {
  return (
    <tr>
      <td>
        <a href={link(["jobs", job.job_id])}>{job.name}</a>
      </td>
      <td>
        <StateBadge state={job.state} />
      </td>
      <td>
        <Progress status={job} />
      </td>
      <td>
        <Digest value={job.weights_digest} />
      </td>
      <td class="num">
        <Age at={job.created_s} />
      </td>
    </tr>
  );
}
