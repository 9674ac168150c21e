// What a job has told so far: its iterations in numbers, its evaluations, its events; and how they become curves.
import { useEffect, useRef, useState } from "preact/hooks";
import { key } from "../api";
import { useResource } from "../live";
import { follow } from "../sse";
import { useStore } from "../store";
import type { EvaluationScore, IterationCommitted, IterationList, IterationMetrics } from "../types";
import { FINAL } from "../ui/parts";

/** An event of the job as it came; a type that this page does not know is shown by its name and fields. */
export interface Told {
  id: string;
  type: string;
  at_s: number;
  [field: string]: unknown;
}

export interface Story {
  /** By iteration; of one that was trained again, the newest. */
  iterations: Map<number, IterationMetrics>;
  evaluations: Map<number, EvaluationScore>;
  /** Oldest first, without commits. */
  events: Told[];
}

const NOTHING: Story = { iterations: new Map(), evaluations: new Map(), events: [] };
const MAX_EVENTS = 1000;

/** Which fields of IterationMetrics say when it was, or hold no single number. */
const NOT_DRAWN = new Set(["iteration", "policy_version", "trainer_epoch", "started_s"]);

/** Every number of an iteration, by the name of its field; components of the reward as `reward: NAME`. */
export function numbers(metrics: IterationMetrics): Map<string, number> {
  const found = new Map<string, number>();
  for (const [name, value] of Object.entries(metrics)) {
    if (typeof value === "number" && !NOT_DRAWN.has(name)) found.set(name, value);
  }
  for (const [name, value] of Object.entries(metrics.reward_components)) found.set(`reward: ${name}`, value);
  const { trajectories } = metrics;
  if (!trajectories) return found;
  for (const [name, value] of Object.entries(trajectories)) if (typeof value === "number") found.set(name, value);
  for (const [name, value] of Object.entries(trajectories.environment)) found.set(`environment: ${name}`, value);
  return found;
}

/** Follows the job's events from its first; where those were trimmed away, the run folder has the numbers. */
export function useStory(jobId: string | null, ended: boolean): Story {
  const [story, setStory] = useState<Story>(NOTHING);
  const bearer = useStore(key);
  const after = useRef("");
  const kept = useResource<IterationList>(jobId && `/v1/jobs/${encodeURIComponent(jobId)}/metrics`);
  useEffect(() => {
    after.current = "";
    setStory(NOTHING);
  }, [jobId]);
  useEffect(() => {
    if (!jobId || !bearer) return;
    let waiting: Told[] = [];
    let frame = 0;
    // Thousands of events come at once at first: they are taken together, once a frame.
    const take = (): void => {
      frame = 0;
      const told = waiting;
      waiting = [];
      setStory((before) => told.reduce(withEvent, { ...before, iterations: new Map(before.iterations), evaluations: new Map(before.evaluations) }));
    };
    const stop = follow(`/v1/jobs/${encodeURIComponent(jobId)}/events`, {
      after: after.current,
      again: () => !ended,
      onEvent: ({ id, data }) => {
        after.current = id;
        waiting.push({ ...(JSON.parse(data) as Omit<Told, "id">), id } as Told);
        frame ||= requestAnimationFrame(take);
      },
    });
    return () => {
      stop();
      cancelAnimationFrame(frame);
      if (waiting.length) take();
    };
  }, [jobId, bearer, ended]);
  const first = story.iterations.size ? Math.min(...story.iterations.keys()) : Infinity;
  const older = kept.value?.iterations.filter(({ iteration }) => iteration < first) ?? [];
  if (!older.length) return story;
  return { ...story, iterations: new Map([...older.map((one) => [one.iteration, one] as const), ...story.iterations]) };
}

/** Changes `story`, which is the caller's own. */
function withEvent(story: Story, event: Told): Story {
  if (event.type === "iteration_committed") {
    const { metrics } = event as unknown as IterationCommitted;
    story.iterations.set(metrics.iteration, metrics);
    return story;
  }
  if (event.type === "evaluation_finished") {
    const score = event.score as EvaluationScore;
    story.evaluations.set(score.iteration, score);
  }
  if (event.type === "rewound") forget(story, event.iteration as number);
  return { ...story, events: [...story.events, event].slice(-MAX_EVENTS) };
}

/** What a rewind took back is trained again. */
function forget(story: Story, iteration: number): void {
  for (const one of [...story.iterations.keys()]) if (one >= iteration) story.iterations.delete(one);
  for (const one of [...story.evaluations.keys()]) if (one > iteration) story.evaluations.delete(one);
}

export function isFinal(state: string): boolean {
  return (FINAL as readonly string[]).includes(state);
}

export type Points = [x: number, y: number][];

export function metricPoints(story: Story, name: string): Points {
  const points: Points = [];
  for (const [iteration, metrics] of story.iterations) {
    const value = numbers(metrics).get(name);
    if (value !== undefined && Number.isFinite(value)) points.push([iteration, value]);
  }
  return points.sort(([a], [b]) => a - b);
}

export function evaluationPoints(story: Story, which: "sampled" | "greedy"): Points {
  const points: Points = [];
  for (const [iteration, score] of story.evaluations) {
    const value = score[which];
    if (value !== null) points.push([iteration, value]);
  }
  return points.sort(([a], [b]) => a - b);
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
