// What the model said: the recorded iterations, their batches, a batch's groups; and a search over all of them.
import type { JSX } from "preact";
import { useRef } from "preact/hooks";
import { useResource } from "../live";
import { Empty, Failure } from "../ui/parts";
import { Absent, isAbsent } from "./parts";
import { Batch } from "./rollouts/batch";
import { Iterations } from "./rollouts/iterations";
import { NotRecorded } from "./rollouts/not_recorded";
import { Search } from "./rollouts/search";
import { isFinal } from "./series";
import type { RecordedList } from "../types";
import "./rollouts/rollouts.css";
import type { TabProps } from "./tab";

export const BATCH_ID = /^\d{1,9}\/(train|evaluation)\/\d{1,9}$/;

export function Rollouts({ jobId, status, query }: TabProps): JSX.Element {
  const limit = 20;
  const path = `/v1/jobs/${encodeURIComponent(jobId)}/rollouts?limit=${limit}`;
  const list = useResource<RecordedList>(path, { again: `${status.iterations_committed} ${status.state}` });
  const opened = useRef<string | undefined>(undefined);
  if (isAbsent(list.error)) return <Absent what="rollouts" />;
  if (!list.value) return list.error ? <Failure error={list.error} /> : <Empty title="…" />;
  if (list.value.recording === null && list.value.iterations.length === 0) return <NotRecorded jobId={jobId} />;
  const named = query.get("batch") ?? "";
  // The newest at first, and then that one: what is read must not change because the job goes on.
  opened.current ??= list.value.iterations[0]?.batches[0]?.batch_id;
  const batchId = BATCH_ID.test(named) ? named : opened.current;
  const sample = query.has("sample") ? Number(query.get("sample")) : null;
  return (
    <div class="rollouts">
      <div class="stack rollouts-side">
        <Search jobId={jobId} />
        <Iterations jobId={jobId} first={list.value} limit={limit} chosen={batchId ?? ""} />
      </div>
      {batchId ? (
        <Batch key={batchId} jobId={jobId} batchId={batchId} group={Number(query.get("group") ?? 0) || 0} sample={sample} />
      ) : (
        <section class="card">
          <Empty title={isFinal(status.state) ? "Nothing was recorded" : "Nothing is recorded yet"}>
            <p>{isFinal(status.state) ? "The job ended before an iteration was." : "The first iteration stands here after its commit."}</p>
          </Empty>
        </section>
      )}
    </div>
  );
}
