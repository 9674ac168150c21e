// The job's spec, every key with its value, to read, to copy and to submit again.
import type { JSX } from "preact";
import { useResource } from "../live";
import { link } from "../router";
import type { JobSpec } from "../types";
import { Empty, Failure } from "../ui/parts";
import { save } from "../ui/saving";
import { Absent, isAbsent } from "./parts";
import { PlainBlock } from "./plain";
import type { TabProps } from "./tab";

export function Spec({ jobId, status }: TabProps): JSX.Element {
  const spec = useResource<JobSpec>(`/v1/jobs/${encodeURIComponent(jobId)}/spec`, { again: `${status.iterations} ${status.trainer_epoch}` });
  if (isAbsent(spec.error)) return <Absent what="spec" />;
  const text = spec.value && JSON.stringify(spec.value, null, 2);
  return (
    <section class="card" aria-labelledby="spec-title">
      <div class="card-head">
        <h2 id="spec-title">Spec</h2>
        {text && (
          <div class="row">
            <button type="button" class="button" onClick={() => save(`${jobId}.spec.json`, new Blob([text], { type: "application/json" }))}>
              Save as JSON
            </button>
            <a class="button" href={link(["new"], { from: jobId })}>
              New job from it
            </a>
          </div>
        )}
      </div>
      <Failure error={spec.error} />
      {text ? <PlainBlock text={text} class="spec-text" /> : !spec.error && <Empty title="Waiting for the gateway" />}
    </section>
  );
}
