// Does it learn: curves of one job, or of several, and every number of the iteration under the cursor.
import type { JSX } from "preact";
import { useMemo, useState } from "preact/hooks";
import { go } from "../router";
import { number, spoken } from "../ui/format";
import { Empty } from "../ui/parts";
import { AXES, AXIS_NAMES, placeAt, xsOf, type Axis } from "./axes";
import { Compare, MOST_COMPARED, useStatuses } from "./compare";
import { AddCurve, CurveCard, HeldOutCard, setsOf, type View } from "./curves";
import { Events } from "./events";
import { byTags, type Run } from "./groups";
import { Model } from "./model";
import { noIteration } from "./parts";
import { Readout } from "./readout";
import { columnNames, isFinal, NOTHING, useStories, type Story } from "./series";
import type { TabProps } from "./tab";

const FIRST_SHOWN = ["entropy", "response_tokens_mean", "grad_norm", "mismatch_k3"];
/** Of a job that learns given completions, whose sampling numbers are all 0. */
const FIRST_SHOWN_OF_GIVEN = ["entropy_trained_tokens", "grad_norm", "learning_rate"];
/** What only some kinds of jobs have, and is looked at first there, beside what an environment reports. */
const OF_A_KIND = new Set(["kl_to_teacher", "explained_variance", "turns_mean", "done_share"]);
const MOST_OF_A_KIND = 4;
const SHOWN_AT = "onbeat.curves";
const VIEW_AT = "onbeat.view";
const FIRST_VIEW: View = { axis: "iteration", isLog: false, smooth: 0, isGrouped: false };

export function Overview({ jobId, status, query }: TabProps): JSX.Element {
  const otherIds = [...new Set((query.get("compare") ?? "").split(",").filter((one) => one && one !== jobId))].slice(0, MOST_COMPARED);
  const others = useStatuses(otherIds);
  const stories = useStories([jobId, ...otherIds], (one) => isFinal(one === jobId ? status.state : (others.get(one)?.state ?? "")));
  const [view, setView] = useState<View>(() => ({ ...FIRST_VIEW, ...(JSON.parse(localStorage.getItem(VIEW_AT) ?? "{}") as Partial<View>) }));
  const [chosen, setChosen] = useState<string[] | null>(() => JSON.parse(localStorage.getItem(SHOWN_AT) ?? "null") as string[] | null);
  const [hovered, setHovered] = useState<number | null>(null);
  const own = stories.get(jobId) ?? NOTHING;
  const runs = useMemo(() => {
    const single: Run[] = [{ status, story: own }];
    for (const otherId of otherIds) {
      const other = others.get(otherId);
      if (other) single.push({ status: other, story: stories.get(otherId) ?? NOTHING });
    }
    return view.isGrouped && otherIds.length ? byTags(single) : single;
  }, [status, stories, others, otherIds.join(), view.isGrouped]);
  const { story } = runs[0]!;
  const learnsGiven = runs.every((run) => run.status.learns_given);
  const names = useMemo(() => metricNames([...stories.values()], learnsGiven), [stories, learnsGiven]);
  const ofKind = names.filter((name) => OF_A_KIND.has(name) || name.startsWith("environment: ")).slice(0, MOST_OF_A_KIND);
  const shown = chosen ?? [...ofKind, ...(learnsGiven ? FIRST_SHOWN_OF_GIVEN : FIRST_SHOWN)];
  const look = (next: Partial<View>): void => {
    localStorage.setItem(VIEW_AT, JSON.stringify({ ...view, ...next }));
    setView({ ...view, ...next });
  };
  const show = (next: string[]): void => {
    localStorage.setItem(SHOWN_AT, JSON.stringify(next));
    setChosen(next);
  };
  const xs = xsOf(story, view.axis);
  const shared = Math.min(...runs.map((one) => one.story.iterations.at(-1) ?? Infinity));
  const place = hovered === null ? story.iterations.findLastIndex((one) => one <= shared) : placeAt(xs, hovered);
  const hasCurves = runs.some((one) => one.story.iterations.length || one.story.evaluations.length);
  return (
    <div class={`overview ${runs.length > 1 ? "compares" : ""}`}>
      <div class="stack">
        <div class="row controls">
          <label class="row small quiet">
            Over
            <select aria-label="Curves over" value={view.axis} onChange={(event) => look({ axis: event.currentTarget.value as Axis })}>
              {AXES.map((axis) => <option key={axis} value={axis}>{AXIS_NAMES[axis]}</option>)}
            </select>
          </label>
          <label class="row small quiet">
            <input type="checkbox" checked={view.isLog} onChange={(event) => look({ isLog: event.currentTarget.checked })} />
            Log scale
          </label>
          <label class="row small quiet">
            Smoothed
            <input type="range" min="0" max="0.98" step="0.02" value={view.smooth} aria-valuetext={view.smooth ? number(view.smooth) : "not at all"} onInput={(event) => look({ smooth: Number(event.currentTarget.value) })} />
          </label>
          <Compare jobId={jobId} otherIds={otherIds} names={(one) => others.get(one)?.name ?? one} onCompare={(next) => go(["jobs", jobId], { compare: next.join(",") })} />
          {otherIds.length > 0 && (
            <label class="row small quiet">
              <input type="checkbox" checked={view.isGrouped} onChange={(event) => look({ isGrouped: event.currentTarget.checked })} />
              Mean by tags
            </label>
          )}
          <AddCurve names={names.filter((name) => !shown.includes(name))} onAdd={(name) => show([...shown, name])} />
        </div>
        {hasCurves ? (
          <div class="charts">
            {/* A job that learns given completions gives no reward: its loss says whether it learns. */}
            {runs.some((run) => run.status.learns_given) && <CurveCard title="Loss" name="loss" runs={runs} view={view} onHover={setHovered} />}
            {runs.some((run) => !run.status.learns_given) && <CurveCard title="Reward" name="reward_mean" runs={runs} view={view} onHover={setHovered} />}
            {["", ...setsOf(runs)].map((set) => (
              <HeldOutCard key={set} set={set} runs={runs} view={view} onHover={setHovered} />
            ))}
            {shown.filter((name) => names.includes(name)).map((name) => (
              <CurveCard key={name} title={spoken(name)} name={name} runs={runs} view={view} onHover={setHovered} onRemove={() => show(shown.filter((one) => one !== name))} />
            ))}
          </div>
        ) : (
          <section class="card">
            {stories.has(jobId) ? (
              <Empty title={noIteration(status.state)}>
                {!isFinal(status.state) && <p>{status.reason || "The first one is on its way."}</p>}
              </Empty>
            ) : (
              <Empty title="Waiting for the gateway" />
            )}
          </section>
        )}
        <Model status={status} />
        <Events events={own.events} numReclaimed={status.batches_reclaimed} isToCome={own.isThinned} />
      </div>
      <Readout iteration={story.iterations[place] ?? -1} runs={runs} isHovered={hovered !== null} />
    </div>
  );
}

/** The numbers that may be drawn besides the one whose card always stands first. */
function metricNames(stories: Story[], learnsGiven: boolean): string[] {
  const names = new Set(stories.flatMap(columnNames));
  names.delete(learnsGiven ? "loss" : "reward_mean");
  return [...names];
}
