// A recorded batch: who sampled it under which version, and one of its groups with its completions side by side.
import type { JSX } from "preact";
import { useEffect, useState } from "preact/hooks";
import { useResource } from "../../live";
import { go } from "../../router";
import { number, plural } from "../../ui/format";
import { Digest, Empty, Failure } from "../../ui/parts";
import { Fact } from "../parts";
import { Plain, PlainBlock } from "../plain";
import type { GroupView, RecordedBatchView } from "../../types";
import { oneLine } from "../visible";
import { Completion } from "./completion";
import { DIFFERENCE_STEPS, HEAT_MODES, meanOf, SURPRISE_STEPS } from "./heat";
import type { HeatMode } from "./heat";

/** Completions of a group that are shown before a person asks for the others. */
const SHOWN_FIRST = 12;

export interface BatchProps {
  jobId: string;
  /** `12/train/3`. */
  batchId: string;
  group: number;
  sample: number | null;
}

export function Batch({ jobId, batchId, group, sample }: BatchProps): JSX.Element {
  const found = useResource<RecordedBatchView>(`/v1/jobs/${encodeURIComponent(jobId)}/rollouts/${batchId}`);
  const batch = found.value;
  if (!batch) return found.error ? <Failure error={found.error} /> : <Empty title="…" />;
  const at = Math.min(Math.max(0, group), batch.groups.length - 1);
  const shown = batch.groups[at];
  const turn = (to: number): void => go(["jobs", jobId, "rollouts"], { batch: batchId, group: String(to) });
  return (
    <section class="card stack batch" aria-labelledby="batch-title">
      <div class="card-head">
        <h2 id="batch-title">Batch {batch.batch_id}</h2>
        <SampleAgain jobId={jobId} batch={batch} />
      </div>
      <dl class="facts">
        <Fact name="Sampled by version">{batch.policy_version} <Digest value={batch.weights_digest} length={8} /></Fact>
        <Fact name="Generator"><Plain text={batch.generator_id} /></Fact>
        <Fact name="Attempt">{batch.attempt}</Fact>
        <Fact name="Digest of the batch"><Digest value={batch.batch_digest} /></Fact>
      </dl>
      <Failure error={found.error} />
      {shown && (
        <>
          <GroupChoice groups={batch.groups} at={at} onTurn={turn} />
          <Group key={`${batch.batch_id} ${at}`} group={shown} sample={sample} />
        </>
      )}
    </section>
  );
}

/** The command that samples the batch again, where its run folder is; or why it can’t be. */
function SampleAgain({ jobId, batch }: { jobId: string; batch: RecordedBatchView }): JSX.Element {
  if (!batch.can_sample_again) return <p class="sample-again quiet small">Can’t be sampled again: <Plain text={batch.why_not} /></p>;
  const [iteration, purpose, index] = batch.batch_id.split("/");
  const command = `onbeat replay ${jobId} --iteration ${iteration} --batch ${index}${purpose === "evaluation" ? " --evaluation" : ""}`;
  return <p class="sample-again small">Sample again: <Digest value={command} length={command.length} /></p>;
}

interface GroupChoiceProps {
  groups: readonly GroupView[];
  at: number;
  onTurn: (to: number) => void;
}

function GroupChoice({ groups, at, onTurn }: GroupChoiceProps): JSX.Element {
  return (
    <div class="row group-choice">
      <button type="button" class="button" disabled={at === 0} onClick={() => onTurn(at - 1)} aria-label="Group before">‹</button>
      <select aria-label="Group" value={String(at)} onChange={(event) => onTurn(Number(event.currentTarget.value))}>
        {groups.map((group, index) => (
          <option key={index} value={String(index)}>
            {`${index + 1} of ${groups.length}: ${oneLine(group.prompt_text, 60)}`}
          </option>
        ))}
      </select>
      <button type="button" class="button" disabled={at === groups.length - 1} onClick={() => onTurn(at + 1)} aria-label="Next group">›</button>
    </div>
  );
}

function Group({ group, sample }: { group: GroupView; sample: number | null }): JSX.Element {
  const [mode, setMode] = useState<HeatMode>("generator");
  const [many, setMany] = useState(Math.max(SHOWN_FIRST, (sample ?? 0) + 1));
  const shown = group.completions.slice(0, many);
  const mean = meanOf(group.completions.map((completion) => completion.reward));
  useEffect(() => {
    if (sample !== null && sample >= 0) document.getElementById(`sample-${sample}`)?.focus();
  }, [sample]);
  return (
    <>
      <div class="prompt">
        <h3>Prompt <span class="faint"><Plain text={group.prompt_id} /></span></h3>
        <PlainBlock text={group.prompt_text} />
        <p class="quiet small">
          {group.reference && <>reference <code><Plain text={group.reference} /></code>, </>}
          mean reward {mean === null ? "—" : number(mean)}
          {group.num_resamples > 0 && `, after ${plural(group.num_resamples, "prompt")} of equal rewards`}
        </p>
      </div>
      <div class="card-head">
        <h3>{plural(group.completions.length, "completion")}</h3>
        <Modes mode={mode} onChange={setMode} />
      </div>
      <div class="completions">
        {shown.map((completion) => <Completion key={completion.sample} completion={completion} mode={mode} />)}
      </div>
      {shown.length < group.completions.length && (
        <button type="button" class="button" onClick={() => setMany(many * 4)}>
          {plural(group.completions.length - shown.length, "more completion")}
        </button>
      )}
    </>
  );
}

function Modes({ mode, onChange }: { mode: HeatMode; onChange: (mode: HeatMode) => void }): JSX.Element {
  const says = HEAT_MODES.find((one) => one.mode === mode)?.says ?? "";
  return (
    <div class="modes">
      <div class="segments" role="group" aria-label="Shade tokens by">
        {HEAT_MODES.map((one) => (
          <button key={one.mode} type="button" aria-pressed={one.mode === mode} onClick={() => onChange(one.mode)}>
            {one.label}
          </button>
        ))}
      </div>
      <p class="legend small quiet">
        {mode === "difference" ? <DifferenceScale /> : mode !== "plain" && <SurpriseScale />} {says}
      </p>
    </div>
  );
}

function SurpriseScale(): JSX.Element {
  return (
    <span class="scale" aria-hidden="true">
      {SURPRISE_STEPS.map((least, at) => <span key={at} class={`token heat-${at + 1}`} title={`log-prob below -${least}`}> </span>)}
    </span>
  );
}

function DifferenceScale(): JSX.Element {
  const steps = DIFFERENCE_STEPS.map((least, at) => [least, at + 1] as const);
  return (
    <span class="scale" aria-hidden="true">
      {[...steps].reverse().map(([least, at]) => <span key={`l${at}`} class={`token less-${at}`} title={`below -${least}`}> </span>)}
      {steps.map(([least, at]) => <span key={`m${at}`} class={`token more-${at}`} title={`above ${least}`}> </span>)}
    </span>
  );
}
