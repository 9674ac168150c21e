// The stack that all jobs share: Redis, the disk, and the processes that live.
import type { JSX } from "preact";
import { useResource } from "../live";
import { link } from "../router";
import type { ConsumerSeen, ServiceSeen, StackReport, StageWorkerSeen, TrainerSeen } from "../types";
import { bytes, duration, plural, share } from "../ui/format";
import { Card, Empty, Failure } from "../ui/parts";
import { Generators } from "../job/fence/generators";
import { Absent, Fact, isAbsent, Table } from "../job/parts";
import { Plain } from "../job/plain";
import { Tasks } from "./tasks";

const EVERY_MS = 2000;
/** From this share on it is said in a colour. */
const FULL_FROM = 0.85;

export function StackPage(): JSX.Element {
  const answer = useResource<StackReport>("/v1/stack/report", { everyMs: EVERY_MS });
  const report = answer.value;
  if (isAbsent(answer.error)) return <Absent what="stack" />;
  if (!report) return answer.error ? <Failure error={answer.error} /> : <Empty title="Waiting for the gateway" />;
  return (
    <>
      <div class="head">
        <h1>Stack</h1>
      </div>
      <Failure error={answer.error} />
      <div class="stack">
        <Redis redis={report.redis} />
        <Disk disk={report.disk} />
        <Consumers consumers={report.consumers} />
        <Trainers trainers={report.trainers} numQueued={report.num_queued} />
        <Generators />
        <StageWorkers workers={report.stage_workers} />
        <Services report={report} />
        <Tasks workers={report.task_workers} />
      </div>
    </>
  );
}

function Redis({ redis }: { redis: StackReport["redis"] }): JSX.Element {
  const used = redis.max_bytes ? redis.used_bytes / redis.max_bytes : 0;
  return (
    <Card title="Redis">
      <dl class="facts">
        <Fact name="Server">{redis.version}</Fact>
        <Fact name="Runs for">{duration(redis.uptime_s)}</Fact>
        <Fact name="Memory">
          <span class={used >= FULL_FROM ? "warn-text" : ""}>
            {bytes(redis.used_bytes)} {redis.max_bytes ? `of ${bytes(redis.max_bytes)}` : "without a limit"}
          </span>
        </Fact>
        <Fact name="Jobs kept">{`${redis.num_jobs} of ${redis.max_jobs}`}</Fact>
        <Fact name="Connections">{redis.num_clients}</Fact>
      </dl>
      {!redis.is_on_disk && <p class="note warn">It has no append-only file (appendonly no): a restart loses open iterations.</p>}
    </Card>
  );
}

function Disk({ disk }: { disk: StackReport["disk"] }): JSX.Element {
  const free = disk.free_bytes / disk.size_bytes;
  return (
    <Card title="Disk of the run root">
      <dl class="facts">
        <Fact name="Free">
          <span class={free <= 1 - FULL_FROM ? "warn-text" : ""}>{`${bytes(disk.free_bytes)}, ${share(free)}`}</span>
        </Fact>
        <Fact name="Size">{bytes(disk.size_bytes)}</Fact>
        <Fact name="All jobs">{bytes(disk.jobs_bytes)}</Fact>
      </dl>
    </Card>
  );
}

function Consumers({ consumers }: { consumers: readonly ConsumerSeen[] }): JSX.Element {
  return (
    <Card title="Consumers">
      {consumers.length === 0 ? (
        <p class="note warn">
          No consumer is running, so no job can get a trainer. Start one with <code>onbeat up</code>.
        </p>
      ) : (
        <Table caption="Consumers" heads={["Consumer", "Trains", "#Running for", "#Last heartbeat"]}>
          {consumers.map(({ worker_id, job_id, lives_s, seen_s }) => (
            <tr key={worker_id}>
              <td><Plain text={worker_id} /></td>
              <td>{job_id ? <a href={link(["jobs", job_id])}><Plain text={job_id} /></a> : "idle"}</td>
              <td class="num">{duration(lives_s)}</td>
              <td class="num">{duration(seen_s)} ago</td>
            </tr>
          ))}
        </Table>
      )}
    </Card>
  );
}

function Trainers({ trainers, numQueued }: { trainers: readonly TrainerSeen[]; numQueued: number }): JSX.Element {
  return (
    <Card title="Trainers">
      {trainers.length === 0 ? (
        <p class="quiet">No job runs.</p>
      ) : (
        <Table caption="Trainers" heads={["Job", "Trainer", "#Iteration", "Waits for"]}>
          {trainers.map(({ job_id, name, iteration, lease_s, reason }) => (
            <tr key={job_id}>
              <td><a href={link(["jobs", job_id])}><Plain text={name} /></a></td>
              <td><span class={`badge ${lease_s === null ? "warn" : "good"}`}>{lease_s === null ? "none" : "live"}</span></td>
              <td class="num">{iteration < 0 ? "—" : iteration}</td>
              <td>{reason ? <Plain text={reason} /> : "—"}</td>
            </tr>
          ))}
        </Table>
      )}
      {numQueued > 0 && <p class="note">{plural(numQueued, "job")} in the queue: a consumer has one trainer at a time.</p>}
    </Card>
  );
}

function StageWorkers({ workers }: { workers: readonly StageWorkerSeen[] }): JSX.Element | null {
  if (!workers.length) return null;
  return (
    <Card title="Stage workers">
      <Table caption="Stage workers" heads={["Worker", "Serves", "#Last heartbeat"]}>
        {workers.map((one) => (
          <tr key={one.worker_id}>
            <td><Plain text={one.worker_id} /></td>
            <td><Plain text={one.serves.join(", ") || "—"} /></td>
            <td class="num">{duration(one.seen_s)} ago</td>
          </tr>
        ))}
      </Table>
    </Card>
  );
}

/** What generators and stage workers say of the services that they ask: the reward service, a judge's server. */
function Services({ report }: { report: StackReport }): JSX.Element {
  const lines = [...report.generators, ...report.stage_workers].flatMap(({ worker_id, services }) =>
    services.map((service) => ({ text: `${worker_id} ${inWords(service)}`, isBad: service.away_s !== null })),
  );
  return (
    <Card title="Services">
      {lines.length === 0 ? (
        <p class="quiet">No process has called a service yet.</p>
      ) : (
        <ul>
          {lines.map(({ text, isBad }) => (
            <li key={text} class={isBad ? "warn-text" : ""}><Plain text={text} /></li>
          ))}
        </ul>
      )}
    </Card>
  );
}

function inWords({ name, away_s, why, answered_s }: ServiceSeen): string {
  if (away_s !== null) return `misses ${name} for ${duration(away_s)} ${why}`;
  return answered_s === null ? `has not asked ${name}` : `reached ${name} ${duration(answered_s)} ago`;
}
