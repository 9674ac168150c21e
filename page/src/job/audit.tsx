// The audit chain: what each iteration trained, under which digest, after which record; and whether it holds.
import type { JSX } from "preact";
import { useRef, useState } from "preact/hooks";
import { useResource } from "../live";
import { number, plural } from "../ui/format";
import { Digest, Empty, Failure } from "../ui/parts";
import { describe, newestFirst } from "./audit/chain";
import type { ChainLink } from "./audit/chain";
import { Verify } from "./audit/verify";
import "./audit/audit.css";
import { Absent, isAbsent, noIteration, Table } from "./parts";
import { Plain } from "./plain";
import type { AuditChain, StreamReport } from "../types";
import type { TabProps } from "./tab";

const SHOWN_AT_ONCE = 20;
const BATCHES_SHOWN = 64;

export function Audit({ jobId, status }: TabProps): JSX.Element {
  const [shown, setShown] = useState(SHOWN_AT_ONCE);
  const path = `/v1/jobs/${encodeURIComponent(jobId)}/audit?last=${shown}`;
  const again = `${status.iterations_committed} ${status.trainer_epoch}`;
  const chain = useResource<AuditChain>(path, { again });
  const streams = useResource<StreamReport>(`/v1/jobs/${encodeURIComponent(jobId)}/streams`, { again }).value;
  const seen = useRef<ChainLink[]>([]);
  if (isAbsent(chain.error)) return <Absent what="audit chain" />;
  if (chain.value) seen.current = newestFirst(chain.value.records);
  const records = seen.current;
  const length = Math.max(records.length, streams?.streams?.find((one) => one.name === "audit")?.num_entries ?? 0);
  return (
    <div class="stack audit">
      <Verify jobId={jobId} state={status.state} />
      <section class="card" aria-labelledby="chain-title">
        <div class="card-head">
          <h2 id="chain-title">Audit chain</h2>
          <span class="quiet small">{plural(length, "record")}, newest first</span>
        </div>
        <Failure error={chain.error} />
        {chain.value && records.length === 0 && <Empty title={noIteration(status.state)} />}
        <ol class="chain">
          {records.map((record) => <Link key={record.digest} record={record} />)}
        </ol>
        {length > records.length && (
          <button type="button" class="button" disabled={chain.loading} onClick={() => setShown(shown * 2)}>
            {plural(length - records.length, "older record")}
          </button>
        )}
      </section>
    </div>
  );
}

function Link({ record }: { record: ChainLink }): JSX.Element {
  return (
    <li class={`link ${record.kind === "rewind" ? "link-rewind" : ""}`}>
      <details>
        <summary>
          <strong>{record.kind === "rewind" ? "Rewind to" : "Iteration"} {record.iteration}</strong>
          <span class="quiet">{describe(record)}</span>
        </summary>
        <LinkFacts record={record} />
      </details>
      <p class="small link-digests">
        <span class="faint">record</span> <Digest value={record.digest ?? ""} /> <span class="faint">after</span>{" "}
        {record.previous ? <Digest value={record.previous} /> : <span class="quiet">nothing: it is the first</span>}
      </p>
    </li>
  );
}

function LinkFacts({ record }: { record: ChainLink }): JSX.Element {
  const batches = Object.entries(record.batches);
  return (
    <>
      <dl class="facts">
        <div><dt>Trained version {record.policy_version}</dt><dd><Digest value={record.weights_digest} /></dd></div>
        {record.next_weights_digest && (
          <div><dt>Made version {record.policy_version + 1}</dt><dd><Digest value={record.next_weights_digest} /></dd></div>
        )}
        <div><dt>Number of the trainer’s lease</dt><dd>{record.trainer_epoch}</dd></div>
        <div><dt>Loss</dt><dd>{number(record.loss, 4)}</dd></div>
        <div><dt>Gradient’s norm</dt><dd>{number(record.grad_norm, 4)}</dd></div>
      </dl>
      {batches.length > 0 && (
        <Table caption={`Batches of iteration ${record.iteration}`} heads={["Batch", "Digest", "Columns", "Sampled by version"]}>
          {batches.slice(0, BATCHES_SHOWN).map(([batchId, digest]) => (
            <tr key={batchId}>
              <td>{batchId}</td>
              <td><Digest value={digest} /></td>
              <td>{record.columns?.[batchId] ? <Digest value={record.columns[batchId]} /> : <span class="faint">—</span>}</td>
              <td>{record.sampled?.find((one) => one.batches.includes(batchId))?.policy_version ?? record.policy_version}</td>
            </tr>
          ))}
        </Table>
      )}
      {batches.length > BATCHES_SHOWN && <p class="quiet small">and {plural(batches.length - BATCHES_SHOWN, "more batch", "more batches")}</p>}
      {Object.entries(record.abandoned).map(([batchId, reason]) => (
        <p key={batchId} class="note warn small">{batchId} was given up: <Plain text={reason} /></p>
      ))}
    </>
  );
}
