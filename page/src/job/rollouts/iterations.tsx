// The recorded iterations, newest first, each with its batches; older ones are asked for when they are wanted.
import type { JSX } from "preact";
import { useEffect, useState } from "preact/hooks";
import { get } from "../../api";
import { link } from "../../router";
import { bytes, number, plural, share } from "../../ui/format";
import { Failure } from "../../ui/parts";
import { Plain } from "../plain";
import type { IterationView, RecordedList, RecordedSummary, RecordingSpec } from "../../types";
import { joined } from "./joined";

/** An iteration may have ten thousand. */
const BATCHES_SHOWN = 200;

export interface IterationsProps {
  jobId: string;
  /** The newest ones, as they are now. */
  first: RecordedList;
  /** The number that an answer has at most: a shorter one is the last. */
  limit: number;
  /** The batch that is shown. */
  chosen: string;
}

export function Iterations({ jobId, first, limit, chosen }: IterationsProps): JSX.Element {
  const [older, setOlder] = useState<IterationView[]>([]);
  const [isEnd, setEnd] = useState(first.iterations.length < limit);
  const [error, setError] = useState<unknown>(null);
  const shown = joined(first.iterations, older);
  useEffect(() => setOlder((before) => joined(first.iterations, before)), [first]);
  const more = async (): Promise<void> => {
    const last = shown.at(-1)?.iteration ?? 0;
    try {
      const next = await get<RecordedList>(`/v1/jobs/${encodeURIComponent(jobId)}/rollouts?limit=${limit}&before=${last}`);
      setOlder((before) => joined(before, next.iterations));
      setEnd(next.iterations.length < limit);
      setError(null);
    } catch (failed) {
      setError(failed);
    }
  };
  const open = Number(chosen.split("/")[0]);
  return (
    <section class="card recorded" aria-labelledby="recorded-title">
      <div class="card-head">
        <h2 id="recorded-title">Recorded</h2>
        <span class="quiet small">{bytes(first.bytes)}</span>
      </div>
      {first.recording && <p class="quiet small">{keptInWords(first.recording)}</p>}
      {first.damaged.map((file) => <p key={file} class="note bad small"><Plain text={file} /></p>)}
      <div class="recorded-list">
        {shown.map((one) => <Iteration key={one.iteration} jobId={jobId} one={one} chosen={chosen} isOpen={one.iteration === open} />)}
      </div>
      <Failure error={error} />
      {!isEnd && <button type="button" class="button little" onClick={() => void more()}>Older iterations</button>}
    </section>
  );
}

/** "12.5 % of the training batches, and evaluations, of the newest 20 iterations" */
function keptInWords({ share: part, evaluations, keep_iterations }: RecordingSpec): string {
  const training = part === 1 ? "all training batches" : part ? `${share(part)} of the training batches` : "";
  const batches = [training, evaluations && "evaluations"].filter(Boolean).join(", and ");
  return `${batches}, of the newest ${plural(keep_iterations, "iteration")}`;
}

interface IterationProps {
  jobId: string;
  one: IterationView;
  chosen: string;
  isOpen: boolean;
}

function Iteration({ jobId, one, chosen, isOpen }: IterationProps): JSX.Element {
  const [wasOpened, setOpened] = useState(isOpen);
  const batches = wasOpened || isOpen ? one.batches.slice(0, BATCHES_SHOWN) : [];
  return (
    <details open={isOpen} onToggle={() => setOpened(true)}>
      <summary>
        <span>Iteration {one.iteration}</span>
        <span class="quiet small">{plural(one.batches.length, "batch", "batches")}{one.num_left_out ? `, ${one.num_left_out} left out` : ""}</span>
      </summary>
      <ul>
        {batches.map((batch) => (
          <li key={batch.batch_id}>
            <a href={link(["jobs", jobId, "rollouts"], { batch: batch.batch_id })} aria-current={batch.batch_id === chosen ? "true" : undefined}>
              <span>{batch.purpose} {batch.index}</span>
              <Summary batch={batch} />
            </a>
          </li>
        ))}
        {batches.length > 0 && batches.length < one.batches.length && (
          <li class="quiet small">and {plural(one.batches.length - batches.length, "more batch", "more batches")}</li>
        )}
      </ul>
    </details>
  );
}

function Summary({ batch }: { batch: RecordedSummary }): JSX.Element {
  return (
    <span class="quiet small nowrap" title={`${plural(batch.num_groups, "group")}, version ${batch.policy_version}, ${batch.generator_id}`}>
      reward {number(batch.reward_mean)}
    </span>
  );
}
