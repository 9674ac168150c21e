// What a job has told so far: its iterations in numbers, its evaluations, its events; and how they become points.
//
// Each event and each iteration comes once: a look asks for what came after the last one (`/story`).
import { useEffect, useRef, useState } from "preact/hooks";
import { get, key } from "../api";
import { asking } from "../asking";
import { useStore } from "../store";
import type { EvaluationList, EvaluationScore, JobStory } from "../types";
import { FINAL } from "../ui/parts";

/** An event of the job as it came; a type that this page does not know is shown by its name and fields. */
export interface Told {
  id: string;
  type: string;
  at_s: number;
  [field: string]: unknown;
}

type Column = (number | null)[];

export interface Story {
  /** Id of the newest event that was seen. */
  after: string;
  /** Ascending; of one that was trained again, the newest. */
  iterations: number[];
  /** By name, a value for each iteration. */
  columns: Map<string, Column>;
  evaluations: EvaluationScore[];
  /** Oldest first, without commits. */
  events: Told[];
  /** Whether iterations between these are still to come. */
  isThinned: boolean;
}

export const NOTHING: Story = { after: "", iterations: [], columns: new Map(), evaluations: [], events: [], isThinned: false };
/** What a chart can show of a long job: drawn at once, before all of it has come. */
const FIRST_ITERATIONS = 1000;
/** As long as it takes to draw them; the rest is asked for then. */
const DRAWN_MS = 250;
const MAX_EVENTS = 1000;
const EVERY_MS = 1000;
const ENDED_EVERY_MS = 10_000;

/** Which columns say when it was. */
const NOT_DRAWN = new Set(["started_s"]);

export function columnNames(story: Story): string[] {
  return [...story.columns.keys()].filter((name) => !NOT_DRAWN.has(name));
}

/** Every number of the iteration at this place, by name. */
export function numbersAt(story: Story, place: number): Map<string, number> {
  const numbers = new Map<string, number>();
  for (const name of columnNames(story)) {
    const value = story.columns.get(name)?.[place];
    if (value != null) numbers.set(name, value);
  }
  return numbers;
}

/** The stories of some jobs, each followed from its first event. ended: whether a job's state is final. */
export function useStories(jobIds: readonly string[], ended: (jobId: string) => boolean): Map<string, Story> {
  const [stories, setStories] = useState<Map<string, Story>>(new Map());
  const bearer = useStore(key);
  const isEnded = useRef(ended);
  isEnded.current = ended;
  const newest = useRef(new Map<string, Story>());
  const wanted = jobIds.join(" ");
  useEffect(() => {
    if (!bearer) return;
    newest.current = new Map([...newest.current].filter(([jobId]) => jobIds.includes(jobId)));
    setStories(new Map(newest.current));
    const all = jobIds.map((jobId) => {
      let story = newest.current.get(jobId) ?? NOTHING;
      return asking(async (stop) => {
        const path = `/v1/jobs/${encodeURIComponent(jobId)}`;
        const isFirst = !newest.current.has(jobId);
        const query = new URLSearchParams({ after: story.after, iteration: String(nextIteration(story)) });
        if (isFirst) query.set("most", String(FIRST_ITERATIONS));
        const scored = (): Promise<EvaluationList> => get(`${path}/evaluations`, { signal: stop });
        const [answer, first] = await Promise.all([get<JobStory>(`${path}/story?${query}`, { signal: stop }), isFirst ? scored() : null]);
        const { now, isRewound } = withAnswer(story, answer);
        const isScored = isRewound || answer.events.some(({ event }) => event.type === "evaluation_finished");
        const scores = first ?? (isScored ? await scored() : null);
        if (stop.aborted) return Infinity;
        if (now !== story || scores) {
          story = scores ? { ...now, evaluations: scores.evaluations } : now;
          newest.current.set(jobId, story);
          setStories(new Map(newest.current));
        }
        if (story.isThinned) return DRAWN_MS;
        if (isRewound) return 0;
        return isEnded.current(jobId) ? ENDED_EVERY_MS : EVERY_MS;
      });
    });
    return () => all.forEach((one) => one.stop());
  }, [wanted, bearer]);
  return stories;
}

function nextIteration(story: Story): number {
  if (story.isThinned) return 0;
  return (story.iterations.at(-1) ?? -1) + 1;
}

/** The story with an answer behind it. After a rewind what it took back is asked for again, and the rows that came with
 * it, which begin behind that, are left out. What follows a thinned story is the whole of it. */
export function withAnswer(story: Story, answer: JobStory): { now: Story; isRewound: boolean } {
  const events = answer.events.map(({ id, event }) => ({ ...event, id }) as unknown as Told);
  const back = Math.min(...events.filter(({ type }) => type === "rewound").map(({ iteration }) => iteration as number));
  const isRewound = back < nextIteration(story);
  if (!events.length && !answer.iterations.length && !story.isThinned) return { now: story, isRewound };
  const before = story.isThinned ? upTo(story, 0) : story;
  const all = { ...before, after: answer.after, events: [...story.events, ...events].slice(-MAX_EVENTS), isThinned: answer.thinned };
  return { now: isRewound ? upTo(all, back) : longer(all, answer), isRewound };
}

/** What was before an iteration. */
function upTo(story: Story, iteration: number): Story {
  const iterations = story.iterations.filter((one) => one < iteration);
  const columns = new Map([...story.columns].map(([name, column]) => [name, column.slice(0, iterations.length)]));
  return { ...story, iterations, columns };
}

function longer(story: Story, answer: JobStory): Story {
  if (!answer.iterations.length) return story;
  const columns = new Map<string, Column>();
  for (const name of new Set([...story.columns.keys(), ...Object.keys(answer.columns)])) {
    const before = story.columns.get(name) ?? blank(story.iterations.length);
    columns.set(name, before.concat(answer.columns[name] ?? blank(answer.iterations.length)));
  }
  return { ...story, iterations: story.iterations.concat(answer.iterations), columns };
}

function blank(length: number): Column {
  return new Array<null>(length).fill(null);
}

/** Ids of the events of trainers that came after another one: that one ended, was killed, or lost its lease. */
export function restarts(events: readonly Told[]): Set<string> {
  const [first, ...others] = events.filter(({ type }) => type === "trainer_started");
  return new Set([...(first?.resumed ? [first] : []), ...others].map(({ id }) => id));
}

export function isFinal(state: string): boolean {
  return (FINAL as readonly string[]).includes(state);
}

export type Points = [x: number, y: number][];

export function metricPoints(story: Story, name: string, xs: readonly number[] = story.iterations): Points {
  const points: Points = [];
  const column = story.columns.get(name);
  if (column) xs.forEach((x, place) => column[place] != null && points.push([x, column[place] as number]));
  return points;
}

export function evaluationPoints(story: Story, which: "sampled" | "greedy"): Points {
  const points: Points = [];
  for (const score of story.evaluations) {
    const value = score[which];
    if (value !== null) points.push([score.iteration, value]);
  }
  return points;
}

/** An exponential mean without the pull to its start (as Adam corrects its own): 0 is raw, 0.98 follows slowly. */
export function smoothed(points: Points, weight: number): Points {
  let mean = 0;
  let known = 0;
  return points.map(([x, y]) => {
    mean = weight * mean + (1 - weight) * y;
    known = weight * known + (1 - weight);
    return [x, mean / known];
  });
}
