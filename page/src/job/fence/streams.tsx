// The fence as it stands: versions, window, counts, leases, streams, stages.
import type { JSX } from "preact";
import type { StreamReport } from "../../types";
import { bytes, duration, number, spoken } from "../../ui/format";
import { Digest } from "../../ui/parts";
import { Fact, Table } from "../parts";
import { Plain } from "../plain";
import { byFrequency, fenceInWords, openIteration, totals } from "./readings";

/** Leases beyond these are counted: the oldest are the ones that matter. */
const LEASES_SHOWN = 50;

type Given = { report: StreamReport };

export function FenceFacts({ report }: Given): JSX.Element {
  const lease = report.trainer_lease_s;
  return (
    <>
      <p class="fence-words">{fenceInWords(report)}</p>
      <dl class="facts">
        <Fact name="Policy version">{report.policy_version}</Fact>
        <Fact name="Digest of its weights"><Digest value={report.weights_digest} /></Fact>
        <Fact name="Number of the trainer’s lease">{report.trainer_epoch || "—"}</Fact>
        <Fact name="Trainer’s lease">{lease === null ? "not held" : `for another ${duration(lease)}`}</Fact>
        <Fact name="Largest lag">{report.max_policy_lag}</Fact>
      </dl>
    </>
  );
}

export function Window({ report }: Given): JSX.Element {
  if (!report.window?.length) return <p class="quiet">No iteration is open.</p>;
  return (
    <Table caption="Open iterations, oldest first" heads={["Open iteration", "Sampled by version", "Lag", "Published"]}>
      {report.window.map(openIteration).map((one) => (
        <tr key={one.iteration}>
          <td>{one.iteration}</td>
          <td>{one.versions}</td>
          <td>{one.lag}</td>
          <td class="published">
            <span class="bar" role="meter" aria-valuemin={0} aria-valuemax={one.expected} aria-valuenow={one.published}
              aria-label={`published batches of iteration ${one.iteration}`}>
              <span style={{ width: `${one.publishedShare * 100}%` }} />
              <span class="bar-dead" style={{ width: `${one.deadShare * 100}%` }} />
            </span>
            <span class="nowrap">
              {one.published} <span class="faint">of {one.expected}</span>
              {one.dead > 0 && `, ${one.dead} given up`}
            </span>
          </td>
        </tr>
      ))}
    </Table>
  );
}

export function Counted({ report }: Given): JSX.Element {
  const rejected = byFrequency(report.batches_rejected ?? {});
  return (
    <div class="fence-pair">
      <section class="card" aria-labelledby="counted-title">
        <h2 id="counted-title">Batches of the whole job</h2>
        <dl class="facts">
          {totals(report).map(([name, many]) => <Fact key={name} name={name}>{number(many)}</Fact>)}
          <Fact name="accepted bytes">{bytes(report.accepted_bytes)}</Fact>
        </dl>
      </section>
      <section class="card" aria-labelledby="rejected-title">
        <h2 id="rejected-title">Rejected, by reason</h2>
        {rejected.length === 0 ? (
          <p class="quiet">The fence rejected no publication.</p>
        ) : (
          <dl class="facts">
            {rejected.map(([reason, many]) => <Fact key={reason} name={spoken(reason)}>{number(many)}</Fact>)}
          </dl>
        )}
      </section>
    </div>
  );
}

export function Leases({ report }: Given): JSX.Element {
  const leases = report.leases ?? [];
  if (leases.length === 0) return <p class="quiet">No generator holds a batch of this job.</p>;
  return (
    <>
      <Table caption="Batches that generators work on" heads={["Batch", "Generator", "#Last heartbeat", "#Handed out"]}>
        {leases.slice(0, LEASES_SHOWN).map((lease) => (
          <tr key={`${lease.batch_id} ${lease.generator_id}`}>
            <td>{lease.batch_id || <span class="quiet">not expected any more</span>}</td>
            <td><Plain text={lease.generator_id} /></td>
            <td class="num">{duration(lease.idle_s)} ago</td>
            <td class={`num ${lease.deliveries > 1 ? "notable" : ""}`}>{lease.deliveries}×</td>
          </tr>
        ))}
      </Table>
      {leases.length > LEASES_SHOWN && <p class="quiet">and {number(leases.length - LEASES_SHOWN)} more</p>}
    </>
  );
}

export function Streams({ report }: Given): JSX.Element {
  return (
    <Table caption="Streams" heads={["Stream", "#Entries", "#Waiting", "#Pending", "#Oldest batch", "#Memory"]}>
      {report.streams?.map((stream) => (
        <tr key={stream.name}>
          <td>{stream.name}</td>
          <td class="num">{number(stream.num_entries)}</td>
          <td class="num">{number(stream.num_waiting)}</td>
          <td class="num">{number(stream.num_pending)}</td>
          <td class="num">{ageOf(stream.oldest_age_s)}</td>
          <td class="num">{bytes(stream.memory_bytes)}</td>
        </tr>
      ))}
    </Table>
  );
}

export function Stages({ report }: Given): JSX.Element | null {
  if (!report.stages?.length) return null;
  const leases = report.stage_leases ?? [];
  const heads = ["Stage", "#Backlog", "#Leased", "#Oldest", "#Workers", "#Rows made", "#Given back", "#Leases expired"];
  return (
    <section class="card" aria-labelledby="stages-title">
      <div class="card-head">
        <h2 id="stages-title">Stages</h2>
        <p class="quiet small">
          {number(report.rows_waiting ?? 0)} published rows lack columns, columns take {bytes(report.columns_bytes ?? 0)}
        </p>
      </div>
      <Table caption="Stages" heads={heads}>
        {report.stages.map((stage) => (
          <tr key={stage.stage}>
            <td><Plain text={stage.stage} /></td>
            <td class="num">{number(stage.num_free)}</td>
            <td class="num">{number(stage.num_leased)}</td>
            <td class="num">{ageOf(stage.oldest_age_s)}</td>
            <td class={`num ${stage.num_workers ? "" : "notable"}`}>{stage.num_workers || "none"}</td>
            <td class="num">{number(stage.rows_made)}</td>
            <td class="num">{number(stage.items_failed)}</td>
            <td class="num">{number(stage.items_reclaimed)}</td>
          </tr>
        ))}
      </Table>
      {leases.length > 0 && (
        <Table caption="Items that stage workers hold" heads={["Item", "Stage", "Worker", "#Since", "#Lease"]}>
          {leases.slice(0, LEASES_SHOWN).map((lease) => (
            <tr key={`${lease.stage} ${lease.batch_id} ${lease.item}`}>
              <td>{lease.item} of {lease.batch_id}</td>
              <td><Plain text={lease.stage} /></td>
              <td><Plain text={lease.worker_id} /></td>
              <td class="num">{duration(lease.age_s)}</td>
              <td class="num">{lease.lease_s > 0 ? `another ${duration(lease.lease_s)}` : "over"}</td>
            </tr>
          ))}
        </Table>
      )}
    </section>
  );
}

function ageOf(age_s: number | null | undefined): string {
  return age_s === null || age_s === undefined ? "—" : duration(age_s);
}
