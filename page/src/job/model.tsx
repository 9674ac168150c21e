// Where the trained model is, and how it becomes a Hugging Face folder: by a worker, or by a command.
import type { JSX } from "preact";
import type { JobStatus } from "../types";
import { bytes, stackFlag } from "../ui/format";
import { Digest } from "../ui/parts";
import { Export } from "./export";

export function Model({ status }: { status: JobStatus }): JSX.Element | null {
  if (!status.iterations_committed) return null;
  const command = `onbeat export ${status.job_id} my-model${stackFlag(status.stack_directory)}`;
  return (
    <section class="card model" aria-labelledby="model-title">
      <div class="card-head">
        <h2 id="model-title">The trained model</h2>
      </div>
      <p>
        Version {status.policy_version}, digest <Digest value={status.weights_digest} length={12} />. An export is a Hugging Face
        folder, written after its hash was checked.
      </p>
      <Export status={status} />
      <p class="quiet small">The command line does the same, and <code>--version N</code> takes another one that is kept:</p>
      <p class="command">
        <Digest value={command} length={command.length} />
      </p>
      <p class="quiet small">
        Checkpoints, weights and logs lie in <code>{status.run_directory}</code> of the run root
        {status.disk_bytes === null ? "" : `, ${bytes(status.disk_bytes)} in all`}.
      </p>
    </section>
  );
}
