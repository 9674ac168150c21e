// Where the trained model is, and the command that makes a Hugging Face folder of it.
import type { JSX } from "preact";
import type { JobStatus } from "../types";
import { bytes } from "../ui/format";
import { Digest } from "../ui/parts";

export function Model({ status }: { status: JobStatus }): JSX.Element | null {
  if (!status.iterations_committed) return null;
  const command = `onbeat export ${status.job_id} my-model`;
  return (
    <section class="card model" aria-labelledby="model-title">
      <div class="card-head">
        <h2 id="model-title">The trained model</h2>
      </div>
      <p>
        Version {status.policy_version}, digest <Digest value={status.weights_digest} length={12} />. This writes it as a
        Hugging Face folder, after its hash was checked:
      </p>
      <p class="command">
        <Digest value={command} length={command.length} />
      </p>
      <p class="quiet small">
        Run it where the stack runs; <code>--version N</code> takes another one that is kept. Checkpoints, weights and logs
        lie in <code>{status.run_directory}</code> of the run root
        {status.disk_bytes === null ? "" : `, ${bytes(status.disk_bytes)} in all`}.
      </p>
    </section>
  );
}
