// What a job without recording says: how another one is told to record.
import type { JSX } from "preact";
import { link } from "../../router";
import { Empty } from "../../ui/parts";

const TABLE = `[recording]
share = 1.0            # of the training batches
keep_iterations = 20   # the newest`;

export function NotRecorded({ jobId }: { jobId: string }): JSX.Element {
  return (
    <section class="card">
      <Empty title="This job records no rollouts">
        <p>
          Its spec says so. Without a word on it, the trainer keeps prompts, completions, rewards and log-probs of about
          one batch of each iteration, within a bound on the disk; this keeps all, and the versions that sampled them:
        </p>
        <pre class="plain-block recording-table">{TABLE}</pre>
        <p><a href={link(["new"], { from: jobId })}>Submit this job again</a></p>
      </Empty>
    </section>
  );
}
