// What is stuck and why: the fence, its streams, the generators, and what was given up.
import type { JSX } from "preact";
import { useResource } from "../live";
import type { StreamReport } from "../types";
import { Empty, Failure } from "../ui/parts";
import { DeadLetters } from "./fence/dead";
import { Generators } from "./fence/generators";
import { Counted, FenceFacts, Leases, Stages, Streams, Window } from "./fence/streams";
import "./fence/fence.css";
import type { TabProps } from "./tab";

const EVERY_MS = 1000;

export function Fence({ jobId, status }: TabProps): JSX.Element {
  const answer = useResource<StreamReport>(`/v1/jobs/${encodeURIComponent(jobId)}/streams`, { everyMs: EVERY_MS });
  const streams = answer.value;
  if (!streams) return answer.error ? <Failure error={answer.error} /> : <Empty title="Waiting for the gateway" />;
  return (
    <div class="stack fence">
      <section class="card" aria-labelledby="fence-title">
        <h2 id="fence-title">The fence</h2>
        <FenceFacts report={streams} />
        <Window report={streams} />
      </section>
      <Generators streams={streams} />
      <section class="card" aria-labelledby="leases-title">
        <h2 id="leases-title">Leases</h2>
        <Leases report={streams} />
      </section>
      <section class="card" aria-labelledby="streams-title">
        <h2 id="streams-title">Streams in Redis</h2>
        <Streams report={streams} />
      </section>
      <Stages report={streams} />
      <Counted report={streams} />
      <DeadLetters jobId={jobId} status={status} numDead={streams.batches_dead} />
    </div>
  );
}
