// Has the gateway check the chain and the weights on disk again, as `onbeat verify` does.
import type { JSX } from "preact";
import { useState } from "preact/hooks";
import { post } from "../../api";
import type { AuditVerdict, JobState } from "../../types";
import { plural } from "../../ui/format";
import { Failure, FINAL } from "../../ui/parts";
import { Plain } from "../plain";

/** Weights of many versions are hashed. */
const DEADLINE_MS = 600_000;

export function Verify({ jobId, state }: { jobId: string; state: JobState }): JSX.Element {
  const [verdict, setVerdict] = useState<AuditVerdict | null>(null);
  const [error, setError] = useState<unknown>(null);
  const [busy, setBusy] = useState(false);
  const run = async (): Promise<void> => {
    setBusy(true);
    setVerdict(null);
    try {
      const path = `/v1/jobs/${encodeURIComponent(jobId)}/verify`;
      setVerdict(await post<AuditVerdict>(path, undefined, { deadlineMs: DEADLINE_MS }));
      setError(null);
    } catch (failed) {
      setError(failed);
    }
    setBusy(false);
  };
  return (
    <section class="card" aria-labelledby="verify-title">
      <div class="card-head">
        <div>
          <h2 id="verify-title">Does it hold?</h2>
          <p class="quiet small">
            Follows the chain from its first record, and hashes the weights on disk again.
            {!FINAL.includes(state) && " The job goes on meanwhile: the check is of what is committed now."}
          </p>
        </div>
        <button type="button" class="button primary" disabled={busy} onClick={() => void run()}>
          {busy ? "Verifying…" : "Verify"}
        </button>
      </div>
      <Failure error={error} />
      <div role="status">{verdict && <Outcome verdict={verdict} />}</div>
    </section>
  );
}

function Outcome({ verdict }: { verdict: AuditVerdict }): JSX.Element {
  return (
    <div class={`note ${verdict.verified ? "good" : "bad"}`}>
      <p>
        <strong>{verdict.verified ? "Verified." : `It does not hold: ${plural(verdict.gaps.length, "gap")}.`}</strong>{" "}
        {plural(verdict.records, "record")} of {plural(verdict.iterations, "iteration")}, {verdict.batches_trained} batches
        trained and {verdict.batches_evaluated} evaluated, {plural(verdict.rewinds, "rewind")},{" "}
        {plural(verdict.digests_recomputed, "version")} hashed again.
      </p>
      {verdict.gaps.length + verdict.notes.length > 0 && (
        <ul class="gaps">
          {verdict.gaps.map((gap) => <li key={gap}><Plain text={gap} /></li>)}
          {verdict.notes.map((note) => <li key={note} class="quiet"><Plain text={note} /></li>)}
        </ul>
      )}
    </div>
  );
}
