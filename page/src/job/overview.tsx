// Does it learn: curves of one job, or of two, and every number of the iteration under the cursor.
import type { JSX } from "preact";
import { useMemo, useState } from "preact/hooks";
import { useResource } from "../live";
import { go } from "../router";
import type { JobList, JobStatus } from "../types";
import { Chart, type Curve } from "../ui/chart";
import { number, spoken } from "../ui/format";
import { Empty } from "../ui/parts";
import { Events } from "./events";
import { Readout } from "./readout";
import { evaluationPoints, isFinal, metricPoints, numbers, smoothed, useStory, type Points, type Story } from "./series";
import type { TabProps } from "./tab";

const FIRST_SHOWN = ["entropy", "response_tokens_mean", "grad_norm", "mismatch_k3"];
const SHOWN_AT = "onbeat.curves";
const SMOOTH_AT = "onbeat.smooth";

interface Told {
  status: JobStatus;
  story: Story;
}

export function Overview({ jobId, status, query }: TabProps): JSX.Element {
  const otherId = query.get("compare");
  const other = useResource<JobStatus>(otherId && `/v1/jobs/${encodeURIComponent(otherId)}`, { everyMs: 5000 }).value;
  const story = useStory(jobId, isFinal(status.state));
  const otherStory = useStory(otherId, other !== null && isFinal(other.state));
  const [smooth, setSmooth] = useState(() => Number(localStorage.getItem(SMOOTH_AT) ?? "0"));
  const [shown, setShown] = useState<string[]>(() => JSON.parse(localStorage.getItem(SHOWN_AT) ?? "null") ?? FIRST_SHOWN);
  const [hovered, setHovered] = useState<number | null>(null);
  const told: Told[] = [{ status, story }, ...(other && otherId ? [{ status: other, story: otherStory }] : [])];
  const names = useMemo(() => metricNames(told.map((one) => one.story)), [story, otherStory]);
  const show = (next: string[]): void => {
    localStorage.setItem(SHOWN_AT, JSON.stringify(next));
    setShown(next);
  };
  const iteration = hovered ?? Math.max(-1, ...story.iterations.keys());
  const hasCurves = told.some((one) => one.story.iterations.size || one.story.evaluations.size);
  return (
    <div class="overview">
      <div class="stack">
        <div class="row controls">
          <label class="row small quiet">
            Smoothed
            <input type="range" min="0" max="0.98" step="0.02" value={smooth} aria-valuetext={smooth ? number(smooth) : "not at all"} onInput={(event) => (localStorage.setItem(SMOOTH_AT, event.currentTarget.value), setSmooth(Number(event.currentTarget.value)))} />
          </label>
          <Compare jobId={jobId} otherId={otherId} />
          <AddCurve names={names.filter((name) => !shown.includes(name))} onAdd={(name) => show([...shown, name])} />
        </div>
        {hasCurves ? (
          <div class="charts">
            <CurveCard title="Reward" name="reward_mean" told={told} smooth={smooth} onHover={setHovered} />
            <HeldOutCard told={told} onHover={setHovered} />
            {shown.filter((name) => names.includes(name)).map((name) => (
              <CurveCard key={name} title={spoken(name)} name={name} told={told} smooth={smooth} onHover={setHovered} onRemove={() => show(shown.filter((one) => one !== name))} />
            ))}
          </div>
        ) : (
          <section class="card">
            <Empty title="No iteration is committed yet">
              <p>{status.reason || "The first one is on its way."}</p>
            </Empty>
          </section>
        )}
        <Events events={story.events} />
      </div>
      <Readout iteration={iteration} told={told} isHovered={hovered !== null} />
    </div>
  );
}

function metricNames(stories: Story[]): string[] {
  const names = new Set<string>();
  for (const story of stories) for (const metrics of story.iterations.values()) for (const name of numbers(metrics).keys()) names.add(name);
  names.delete("reward_mean");
  return [...names];
}

interface CardProps {
  told: Told[];
  onHover: (x: number | null) => void;
}

/** All charts of the screen end at the same iteration. */
function lastIteration(told: Told[]): number {
  return Math.max(1, ...told.flatMap(({ story }) => [...story.iterations.keys(), ...story.evaluations.keys()]));
}

function CurveCard(props: CardProps & { title: string; name: string; smooth: number; onRemove?: () => void }): JSX.Element {
  const { title, name, told, smooth, onHover, onRemove } = props;
  const curves = useMemo(
    () => told.flatMap(({ status, story }, index) => drawn(metricPoints(story, name), { label: told.length > 1 ? status.name : title, index, smooth })),
    [...told.map((one) => one.story), told.length, name, smooth],
  );
  const last = told[0] ? metricPoints(told[0].story, name).at(-1) : undefined;
  return (
    <section class="card">
      <div class="card-head">
        <h2 class="metric">{title}</h2>
        <span class="row">
          {last && <span class="latest">{number(last[1])}</span>}
          {onRemove && (
            <button type="button" class="button plain little" aria-label={`Remove the curve ${title}`} onClick={onRemove}>
              ×
            </button>
          )}
        </span>
      </div>
      <Legend told={told} />
      <Chart title={title} curves={curves} group="job" lastX={lastIteration(told)} onHover={onHover} />
    </section>
  );
}

function drawn(points: Points, { label, index, smooth }: { label: string; index: number; smooth: number }): Curve[] {
  const look = { colour: index ? "--c2" : "--c1", dots: points.length < 3 };
  if (!smooth) return [{ label, points, ...look }];
  return [
    { label: `${label}, raw`, points, raw: true, ...look },
    { label, points: smoothed(points, smooth), ...look },
  ];
}

function HeldOutCard({ told, onHover }: CardProps): JSX.Element | null {
  const curves = useMemo(
    () =>
      told.flatMap(({ status, story }, index): Curve[] => {
        const label = told.length > 1 ? `${status.name}, ` : "";
        const colour = index ? "--c2" : "--c1";
        return [
          { label: `${label}sampled`, colour, points: evaluationPoints(story, "sampled"), dots: true },
          { label: `${label}greedy`, colour, points: evaluationPoints(story, "greedy"), dashed: true, dots: true },
        ];
      }),
    [...told.map((one) => one.story), told.length],
  );
  if (!curves.some((curve) => curve.points.length)) return null;
  const last = told[0] ? evaluationPoints(told[0].story, "sampled").at(-1) : undefined;
  return (
    <section class="card">
      <div class="card-head">
        <h2 class="metric">Held-out</h2>
        <span class="row small quiet">
          <span class="key-line" /> sampled <span class="key-line dashed" /> greedy
          {last && <span class="latest">{number(last[1])}</span>}
        </span>
      </div>
      <Legend told={told} />
      <Chart title="Held-out reward" curves={curves} group="job" lastX={lastIteration(told)} onHover={onHover} />
    </section>
  );
}

function Legend({ told }: { told: Told[] }): JSX.Element | null {
  if (told.length < 2) return null;
  return (
    <p class="row small quiet legend">
      {told.map(({ status }, index) => (
        <span key={status.job_id} class={`key-of c${index + 1}`}>
          {status.name}
        </span>
      ))}
    </p>
  );
}

function Compare({ jobId, otherId }: { jobId: string; otherId: string | null }): JSX.Element {
  const jobs = useResource<JobList>("/v1/jobs?limit=200", { everyMs: 15_000 }).value?.jobs ?? [];
  return (
    <select aria-label="Compare with another job" value={otherId ?? ""} onChange={(event) => go(["jobs", jobId], { compare: event.currentTarget.value })}>
      <option value="">Compare with…</option>
      {otherId && !jobs.some((job) => job.job_id === otherId) && <option value={otherId}>{otherId}</option>}
      {jobs
        .filter((job) => job.job_id !== jobId)
        .map((job) => (
          <option key={job.job_id} value={job.job_id}>
            {job.name} · {job.job_id}
          </option>
        ))}
    </select>
  );
}

function AddCurve({ names, onAdd }: { names: string[]; onAdd: (name: string) => void }): JSX.Element {
  return (
    <select aria-label="Add a curve" value="" disabled={!names.length} onChange={(event) => event.currentTarget.value && onAdd(event.currentTarget.value)}>
      <option value="">Add a curve…</option>
      {names.map((name) => (
        <option key={name} value={name}>
          {spoken(name)}
        </option>
      ))}
    </select>
  );
}
