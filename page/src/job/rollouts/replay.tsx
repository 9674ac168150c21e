// Has a generator sample a recorded batch once more, and shows whether the digest is the same.
import type { JSX } from "preact";
import { useEffect, useState } from "preact/hooks";
import { get, post, Refused } from "../../api";
import { Digest, Failure } from "../../ui/parts";
import { Plain } from "../plain";
import type { RecordedBatchView, Replay } from "../../types";

const LOOK_MS = 700;

export function SampleAgain({ jobId, batch }: { jobId: string; batch: RecordedBatchView }): JSX.Element {
  const [replay, setReplay] = useState<Replay | null>(null);
  const [error, setError] = useState<unknown>(null);
  const path = `/v1/jobs/${encodeURIComponent(jobId)}/replays`;
  const isOpen = replay?.state === "queued" || replay?.state === "sampling";
  useEffect(() => {
    if (!replay || !isOpen) return;
    const stop = new AbortController();
    // A gateway that is away is asked again: the request itself lies in Redis.
    const timer = setInterval(() => {
      get<Replay>(`${path}/${encodeURIComponent(replay.replay_id)}`, { signal: stop.signal })
        .then((next) => (setReplay(next), setError(null)))
        .catch((failed) => {
          if (stop.signal.aborted) return;
          setError(failed);
          if (failed instanceof Refused && failed.problem.status === 404) setReplay(null);
        });
    }, LOOK_MS);
    return () => {
      clearInterval(timer);
      stop.abort();
    };
  }, [path, replay?.replay_id, isOpen]);

  const ask = async (): Promise<void> => {
    try {
      setReplay(await post<Replay>(path, { batch_id: batch.batch_id }));
      setError(null);
    } catch (failed) {
      setError(failed);
    }
  };
  return (
    <div class="sample-again">
      <button type="button" class="button primary" disabled={!batch.can_sample_again || isOpen} onClick={() => void ask()}>
        Sample again
      </button>
      {!batch.can_sample_again && <p class="quiet small"><Plain text={batch.why_not} /></p>}
      <Failure error={error} />
      <div role="status">{replay && <Outcome replay={replay} />}</div>
    </div>
  );
}

function Outcome({ replay }: { replay: Replay }): JSX.Element {
  if (replay.state === "queued") {
    return <p class="note">Queued: <Plain text={replay.reason || "it waits for a generator"} /></p>;
  }
  if (replay.state === "sampling") {
    return <p class="note">Sampled again by <Plain text={replay.generator_id || "a generator"} />…</p>;
  }
  if (replay.state === "failed") {
    return <p class="note bad">It could not be sampled again: <Plain text={replay.reason} /></p>;
  }
  return (
    <div class={`note ${replay.equal ? "good" : "bad"}`}>
      <p><strong>{replay.equal ? "The same, bit for bit." : "It is not the same."}</strong></p>
      <p class="small">recorded <Digest value={replay.recorded_digest} length={24} /></p>
      <p class="small">
        again <Digest value={replay.digest} length={24} /> by <Plain text={replay.generator_id} />
      </p>
      {!replay.equal && <p><Plain text={replay.reason} /></p>}
    </div>
  );
}
