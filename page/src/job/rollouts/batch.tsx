// A recorded batch: who sampled it under which version, and one of its groups with its completions side by side.
import type { JSX } from "preact";
import { useEffect, useState } from "preact/hooks";
import { useResource } from "../../live";
import { go } from "../../router";
import { number, plural, stackFlag } from "../../ui/format";
import { Digest, Empty, Failure } from "../../ui/parts";
import { Fact } from "../parts";
import { Plain, PlainBlock } from "../plain";
import type { GroupView, JobStatus, RecordedBatchView } from "../../types";
import { oneLine } from "../visible";
import { Completion } from "./completion";
import { DIFFERENCE_STEPS, HEAT_MODES, meanOf, SURPRISE_STEPS } from "./heat";
import type { HeatMode } from "./heat";
import { bars, ORDER_NAMES, ordered, ORDERS, rewardsOf, type Order } from "./rewards";

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
  const [order, setOrder] = useState<Order>("sampled");
  const batch = found.value;
  if (!batch) return found.error ? <Failure error={found.error} /> : <Empty title="…" />;
  const at = Math.min(Math.max(0, group), batch.groups.length - 1);
  const shown = batch.groups[at];
  const turn = (to: number): void => go(["jobs", jobId, "rollouts"], { batch: batchId, group: String(to) });
  return (
    <section class="card stack batch" aria-labelledby="batch-title">
      <h2 id="batch-title">Batch {batch.batch_id}</h2>
      <dl class="facts">
        <Fact name="Sampled by version">{batch.policy_version} <Digest value={batch.weights_digest} length={8} /></Fact>
        <Fact name="Generator"><Plain text={batch.generator_id} /></Fact>
        <Fact name="Attempt">{batch.attempt}</Fact>
        <Fact name="Digest of the batch"><Digest value={batch.batch_digest} /></Fact>
      </dl>
      <Failure error={found.error} />
      {shown && (
        <>
          <Rewards groups={batch.groups} shown={shown} order={order} onOrder={setOrder} />
          <GroupChoice groups={batch.groups} at={at} order={order} onTurn={turn} />
          <Group key={`${batch.batch_id} ${at}`} group={shown} sample={sample} order={order} />
        </>
      )}
      {/* A reader wants the completions first, and seldom this. */}
      <SampleAgain jobId={jobId} batch={batch} />
    </section>
  );
}

/** The command that samples the batch again, where its run folder is; or why it can’t be. */
function SampleAgain({ jobId, batch }: { jobId: string; batch: RecordedBatchView }): JSX.Element {
  if (!batch.can_sample_again) return <p class="sample-again quiet small">Can’t be sampled again: <Plain text={batch.why_not} /></p>;
  return <SampleCommand jobId={jobId} batch={batch} />;
}

function SampleCommand({ jobId, batch }: { jobId: string; batch: RecordedBatchView }): JSX.Element {
  const job = useResource<JobStatus>(`/v1/jobs/${encodeURIComponent(jobId)}`);
  const [iteration, purpose, index] = batch.batch_id.split("/");
  const command = `onbeat replay ${jobId} --iteration ${iteration} --batch ${index}${purpose === "evaluation" ? " --evaluation" : ""}${stackFlag(job.value?.stack_directory ?? "")}`;
  return <p class="sample-again small">Sample again: <Digest value={command} length={command.length} /></p>;
}

interface RewardsProps {
  groups: readonly GroupView[];
  shown: GroupView;
  order: Order;
  onOrder: (order: Order) => void;
}

/** How many completions got which reward: of the batch, and in the darker part of a bar of the group that is shown. */
function Rewards({ groups, shown, order, onOrder }: RewardsProps): JSX.Element {
  const found = bars(groups.flatMap(rewardsOf), rewardsOf(shown));
  const most = Math.max(...found.map((bar) => bar.all));
  const shareOf = (many: number): string => `${(many / most) * 100}%`;
  return (
    <div class="rewards">
      <div class="card-head">
        <h3>Rewards <span class="quiet small">light: all completions of the batch; dark: this group</span></h3>
        <select aria-label="Order of groups and completions" value={order} onChange={(event) => onOrder(event.currentTarget.value as Order)}>
          {ORDERS.map((one) => <option key={one} value={one}>{ORDER_NAMES[one]}</option>)}
        </select>
      </div>
      <ul class="small" aria-label="Completions by reward">
        {found.map(({ label, all, here }) => (
          <li key={label} aria-label={`reward ${label}: ${plural(all, "completion")}, ${here} of this group`}>
            <span class="num">{label}</span>
            <span class="reward-bar" aria-hidden="true">
              <span style={{ width: shareOf(all) }}><span style={{ width: `${all && (here / all) * 100}%` }} /></span>
            </span>
            <span class="quiet">{all}</span>
          </li>
        ))}
      </ul>
    </div>
  );
}

interface GroupChoiceProps {
  groups: readonly GroupView[];
  /** The group's place in the batch. */
  at: number;
  order: Order;
  onTurn: (to: number) => void;
}

function GroupChoice({ groups, at, order, onTurn }: GroupChoiceProps): JSX.Element {
  const means = groups.map((group) => meanOf(rewardsOf(group)) ?? 0);
  const places = ordered([...groups.keys()], order, (place) => means[place]!);
  const now = places.indexOf(at);
  return (
    <div class="row group-choice">
      <button type="button" class="button" disabled={now === 0} onClick={() => onTurn(places[now - 1]!)} aria-label="Group before">‹</button>
      <select aria-label="Group" value={String(at)} onChange={(event) => onTurn(Number(event.currentTarget.value))}>
        {places.map((place) => (
          <option key={place} value={String(place)}>
            {`${place + 1} of ${groups.length}, reward ${number(means[place]!)}: ${oneLine(groups[place]!.prompt_text, 60)}`}
          </option>
        ))}
      </select>
      <button type="button" class="button" disabled={now === places.length - 1} onClick={() => onTurn(places[now + 1]!)} aria-label="Next group">›</button>
    </div>
  );
}

function Group({ group, sample, order }: { group: GroupView; sample: number | null; order: Order }): JSX.Element {
  const [mode, setMode] = useState<HeatMode>("generator");
  const [many, setMany] = useState(Math.max(SHOWN_FIRST, (sample ?? 0) + 1));
  const shown = ordered(group.completions, order, (completion) => completion.reward).slice(0, many);
  const mean = meanOf(rewardsOf(group));
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
