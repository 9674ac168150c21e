// A card for each curve: of one job or of several, with what it takes to read and to keep it.
import type { JSX } from "preact";
import { useMemo, useRef } from "preact/hooks";
import type uPlot from "uplot";
import { Chart, type Curve, type Mark } from "../ui/chart";
import { number, spoken } from "../ui/format";
import { csvOf, picture, save } from "../ui/saving";
import { AXIS_NAMES, evaluationPoints, inWords, shortly, STEPS, xsOf, type Axis } from "./axes";
import type { Run } from "./groups";
import { metricPoints, restarts, smoothed, type Points, type Story } from "./series";

/** How all curves of the screen are drawn. */
export interface View {
  axis: Axis;
  isLog: boolean;
  smooth: number;
  /** Whether runs with the same tags are drawn as their mean. */
  isGrouped: boolean;
}

interface CardProps {
  runs: Run[];
  view: View;
  onHover: (x: number | null) => void;
}

const COLOURS = ["--c1", "--c2", "--c3", "--c4", "--c5", "--c6"] as const;

export function colourOf(index: number): string {
  return COLOURS[index % COLOURS.length]!;
}

export function CurveCard(props: CardProps & { title: string; name: string; onRemove?: () => void }): JSX.Element {
  const { title, name, runs, view, onHover, onRemove } = props;
  const curves = useMemo(
    () =>
      runs.flatMap(({ status, story }, index) =>
        drawn(metricPoints(story, name, xsOf(story, view.axis)), { label: isNamed(runs) ? status.name : title, index, smooth: view.smooth }),
      ),
    [...runs.map((one) => one.story), runs.length, name, view.axis, view.smooth],
  );
  const column = runs[0]?.story.columns.get(name);
  const last = column?.findLast((value) => value !== null);
  return (
    <CardOf title={title} curves={curves} runs={runs} view={view} onHover={onHover} onRemove={onRemove}>
      {last != null && <span class="latest">{number(last)}</span>}
    </CardOf>
  );
}

/** The further sets of the jobs' evaluations, by name. */
export function setsOf(runs: readonly Run[]): string[] {
  return [...new Set(runs.flatMap(({ story }) => story.evaluations.flatMap((score) => Object.keys(score.sets ?? {}))))];
}

export function HeldOutCard({ runs, view, onHover, set = "" }: CardProps & { set?: string }): JSX.Element | null {
  const curves = useMemo(
    () =>
      runs.flatMap(({ status, story }, index): Curve[] => {
        const label = isNamed(runs) ? `${status.name}, ` : "";
        const colour = colourOf(index);
        return [
          { label: `${label}sampled`, colour, points: evaluationPoints(story, "sampled", view.axis, set), dots: true },
          { label: `${label}greedy`, colour, points: evaluationPoints(story, "greedy", view.axis, set), dashed: true, dots: true },
        ];
      }),
    [...runs.map((one) => one.story), runs.length, view.axis, set],
  );
  if (!curves.some((curve) => curve.points.length)) return null;
  const newest = runs[0]?.story.evaluations.at(-1);
  const last = set ? newest?.sets?.[set] : newest;
  const title = set ? `Held-out: ${set}` : "Held-out";
  return (
    <CardOf title={title} spokenTitle={title.replace("Held-out", "Held-out reward")} hasTwoLines curves={curves} runs={runs} view={view} onHover={onHover}>
      {last && <span class="latest">{number(last.sampled)}</span>}
    </CardOf>
  );
}

interface CardOfProps extends CardProps {
  title: string;
  spokenTitle?: string;
  hasTwoLines?: boolean;
  curves: Curve[];
  onRemove?: (() => void) | undefined;
  children?: JSX.Element | null | false | (JSX.Element | null | undefined | false)[];
}

function CardOf({ title, spokenTitle, hasTwoLines, curves, runs, view, onHover, onRemove, children }: CardOfProps): JSX.Element {
  const plot = useRef<uPlot | null>(null);
  const { axis } = view;
  const file = `${runs[0]?.status.job_id ?? "job"}-${title.toLowerCase().replaceAll(/[^a-z0-9]+/g, "-")}`;
  const keepCsv = (): void => save(`${file}.csv`, new Blob([csvOf(axis === "time" ? "seconds" : axis, curves)], { type: "text/csv" }));
  const keepPng = async (): Promise<void> => {
    if (plot.current) save(`${file}.png`, await picture(plot.current.ctx.canvas, title, curves));
  };
  const isThinned = runs.some(({ story }) => story.isThinned);
  const marks = useMemo(() => (runs[0] ? marksOf(runs[0].story, axis) : []), [runs[0]?.story, axis]);
  return (
    <section class="card">
      <div class="card-head">
        <h2 class="metric">{title}</h2>
        <span class="row card-tools">
          {children}
          <button type="button" class="button plain little" disabled={isThinned} title="Save the points as CSV" aria-label={`Save ${title} as CSV`} onClick={keepCsv}>
            CSV
          </button>
          <button type="button" class="button plain little" title="Save the picture as PNG" aria-label={`Save ${title} as PNG`} onClick={() => void keepPng()}>
            PNG
          </button>
          {onRemove && (
            <button type="button" class="button plain little" aria-label={`Remove the curve ${title}`} onClick={onRemove}>
              ×
            </button>
          )}
        </span>
      </div>
      {hasTwoLines && (
        <p class="row small quiet">
          <span class="key-line" /> sampled <span class="key-line dashed" /> greedy
        </p>
      )}
      <Legend runs={runs} />
      <Chart
        title={spokenTitle ?? title}
        curves={curves}
        group="job"
        isLog={view.isLog}
        isBusy={isThinned}
        lastX={lastX(runs, axis)}
        marks={marks}
        onHover={onHover}
        plot={plot}
        x={{ steps: STEPS[axis], label: (at, step) => shortly(axis, at, step), words: (at) => inWords(axis, at), name: AXIS_NAMES[axis] }}
      />
    </section>
  );
}

/** Whether a curve needs to say whose it is. */
function isNamed(runs: readonly Run[]): boolean {
  return runs.length > 1 || runs[0]?.numRuns !== undefined;
}

/** All charts of the screen end at the same x. */
function lastX(runs: Run[], axis: Axis): number {
  return Math.max(1, ...runs.map(({ story }) => Math.max(xsOf(story, axis).at(-1) ?? 0, axis === "iteration" ? (story.evaluations.at(-1)?.iteration ?? 0) : 0)));
}

/** Where a trainer had to go on from another's checkpoint: killed processes and lost leases are seen here. */
function marksOf(story: Story, axis: Axis): Mark[] {
  const xs = xsOf(story, axis);
  const later = restarts(story.events);
  return story.events
    .filter(({ id, type }) => type === "rewound" || later.has(id))
    .map(({ next_iteration, iteration }) => Number(next_iteration ?? iteration))
    .flatMap((iteration) => {
      const place = story.iterations.findIndex((one) => one >= iteration);
      return place < 0 ? [] : [{ x: xs[place]! }];
    });
}

function drawn(points: Points, { label, index, smooth }: { label: string; index: number; smooth: number }): Curve[] {
  const look = { colour: colourOf(index), dashed: index >= COLOURS.length, dots: points.length < 3 };
  if (!smooth) return [{ label, points, ...look }];
  return [
    { label: `${label}, raw`, points, raw: true, ...look },
    { label, points: smoothed(points, smooth), ...look },
  ];
}

function Legend({ runs }: { runs: Run[] }): JSX.Element | null {
  if (!isNamed(runs)) return null;
  return (
    <p class="row small quiet legend">
      {runs.map(({ status }, index) => (
        <span key={status.job_id} class={`key-of c${(index % COLOURS.length) + 1}`} title={status.job_id}>
          {status.name}
        </span>
      ))}
    </p>
  );
}

export function AddCurve({ names, onAdd }: { names: string[]; onAdd: (name: string) => void }): JSX.Element {
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
