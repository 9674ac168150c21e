// Where the time of the last iterations went: a lane for each generator and rank.
import type { JSX } from "preact";
import { useState } from "preact/hooks";
import { send } from "../api";
import { useResource } from "../live";
import { go } from "../router";
import { Empty, Failure, FINAL } from "../ui/parts";
import { LaneChart } from "./lanes/chart";
import { Legend } from "./lanes/facts";
import { Absent, isAbsent, noIteration } from "./parts";
import type { TimelineReport } from "../types";
import "./lanes/lanes.css";
import type { TabProps } from "./tab";

const SHOWN = [1, 3, 10, 30];
const NEW_EVERY_MS = 3000;

export function Lanes({ jobId, status, query }: TabProps): JSX.Element {
  const number = Number(query.get("last"));
  const last = Number.isInteger(number) && number >= 1 && number <= 100 ? number : 3;
  const [paused, setPaused] = useState(false);
  const isFinal = FINAL.includes(status.state);
  const everyMs = isFinal || paused ? undefined : NEW_EVERY_MS;
  const path = `/v1/jobs/${encodeURIComponent(jobId)}/timeline?last=${last}`;
  const timeline = useResource<TimelineReport>(path, { everyMs, again: isFinal });
  if (isAbsent(timeline.error)) return <Absent what="timelines" />;
  const report = timeline.value;
  return (
    <section class="card stack lanes-card" aria-labelledby="lanes-title">
      <div class="card-head">
        <h2 id="lanes-title">Where the time goes</h2>
        <div class="row">
          <label class="lanes-choice small quiet">
            Iterations
            <select value={String(last)} onChange={(event) => go(["jobs", jobId, "lanes"], { last: event.currentTarget.value })}>
              {[...new Set([...SHOWN, last])].sort((a, b) => a - b).map((many) => <option key={many} value={String(many)}>{many}</option>)}
            </select>
          </label>
          {!isFinal && (
            <button type="button" class="button" aria-pressed={paused} onClick={() => setPaused(!paused)}>
              {paused ? "Go on" : "Hold still"}
            </button>
          )}
          <Export jobId={jobId} />
        </div>
      </div>
      <Failure error={timeline.error} />
      {report && report.spans.length > 0 ? (
        <>
          <p class="lanes-words">{report.words}</p>
          <Legend report={report} />
          <LaneChart report={report} />
        </>
      ) : (
        report && (
          <Empty title={noIteration(status.state)}>
            {!isFinal && <p>The lanes of the first one stand here after its commit.</p>}
          </Empty>
        )
      )}
    </section>
  );
}

/** Saves a trace that ui.perfetto.dev and chrome://tracing open. */
function Export({ jobId }: { jobId: string }): JSX.Element {
  const [error, setError] = useState<unknown>(null);
  const save = async (): Promise<void> => {
    try {
      const answer = await send("GET", `/v1/jobs/${encodeURIComponent(jobId)}/timeline/perfetto`, { deadlineMs: 60_000 });
      const address = URL.createObjectURL(await answer.blob());
      const link = document.createElement("a");
      link.href = address;
      link.download = `${jobId}.trace.json`;
      link.click();
      URL.revokeObjectURL(address);
      setError(null);
    } catch (failed) {
      setError(failed);
    }
  };
  return (
    <>
      <button type="button" class="button" onClick={() => void save()}>Export for Perfetto</button>
      <Failure error={error} />
    </>
  );
}
