// Has a worker check the chain and the weights on disk again, as `onbeat verify` does.
import type { JSX } from "preact";
import { useJobTask } from "../../tasks/job_task";
import { Asked, EndedTask, OpenTask } from "../../tasks/parts";
import { isOpen } from "../../tasks/tasks";
import type { AuditVerdict, JobState } from "../../types";
import { plural } from "../../ui/format";
import { Failure, FINAL } from "../../ui/parts";
import { Plain } from "../plain";

export function Verify({ jobId, state }: { jobId: string; state: JobState }): JSX.Element {
  const { task, error, isBusy, start, reload } = useJobTask(jobId, "verify", `/v1/jobs/${encodeURIComponent(jobId)}/verify`);
  return (
    <section class="card" aria-labelledby="verify-title">
      <div class="card-head">
        <div>
          <h2 id="verify-title">Does it hold?</h2>
          <p class="quiet small">
            Follows the chain from its first record, and hashes the weights on disk again.
            {!FINAL.includes(state) && " The job goes on meanwhile: the check is of what is committed when it begins."}
          </p>
        </div>
        <button type="button" class="button primary" disabled={isBusy} onClick={() => void start()}>
          {isBusy ? "Verifying…" : "Verify"}
        </button>
      </div>
      <Failure error={error} />
      {task && isOpen(task) && <OpenTask task={task} onDone={reload} />}
      <div role="status">
        {task && <EndedTask task={task} />}
        {task?.result?.verdict && <Outcome verdict={task.result.verdict} />}
      </div>
      {task && <Asked task={task} />}
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
