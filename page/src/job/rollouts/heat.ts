// Log-probs as shades, and a completion as the pieces of its turns and of what stands between them.
import { number } from "../../ui/format";
import type { CompletionView } from "../../types";

export type HeatMode = "generator" | "trainer" | "difference" | "plain";

export const HEAT_MODES: readonly { mode: HeatMode; label: string; says: string }[] = [
  { mode: "generator", label: "generator", says: "the stronger, the less likely the generator found the token" },
  { mode: "trainer", label: "trainer", says: "the stronger, the less likely the trainer found the token" },
  { mode: "difference", label: "difference", says: "blue: less likely to the trainer; orange: more" },
  { mode: "plain", label: "text", says: "no colours" },
];

/** Least surprise, in nats, of each shade from 1 on: a token of probability 0.95 and more has none. */
export const SURPRISE_STEPS: readonly number[] = [0.05, 0.2, 0.5, 1, 2, 3.5, 6, 10];
/** Least difference of each shade from 1 on. Below 1e-5 it is the arithmetic of two engines. */
export const DIFFERENCE_STEPS: readonly number[] = [1e-5, 1e-4, 1e-3, 1e-2, 5e-2, 0.2, 0.5, 1];

function step(value: number, steps: readonly number[]): number {
  const beyond = steps.findIndex((least) => value < least);
  return beyond < 0 ? steps.length : beyond;
}

/** 0 to 8 of a log-prob; null where there is none. */
export function surpriseShade(logprob: number | null | undefined): number | null {
  return logprob === null || logprob === undefined ? null : step(-logprob, SURPRISE_STEPS);
}

/** −8 to 8: above 0 the trainer finds the token more likely than the generator. */
export function differenceShade(generator: number | null | undefined, trainer: number | null | undefined): number | null {
  if (generator === null || generator === undefined || trainer === null || trainer === undefined) return null;
  const difference = trainer - generator;
  return step(Math.abs(difference), DIFFERENCE_STEPS) * (difference < 0 ? -1 : 1) || 0;
}

/** The class of a token's shade in a mode: `heat-3`, `less-2`, `more-5`, `unknown`, or "" without a colour. */
export function shadeClass(completion: CompletionView, at: number, mode: HeatMode): string {
  if (mode === "plain" || !completion.sampled[at]) return "";
  const generator = completion.generator_logprobs[at];
  const trainer = completion.trainer_logprobs[at];
  if (mode === "difference") {
    const shade = differenceShade(generator, trainer);
    if (shade === null) return "unknown";
    return shade === 0 ? "" : shade < 0 ? `less-${-shade}` : `more-${shade}`;
  }
  const shade = surpriseShade(mode === "generator" ? generator : trainer);
  if (shade === null) return "unknown";
  return shade === 0 ? "" : `heat-${shade}`;
}

/** What is said of a token: who found it how likely, and by how much they differ. */
export function tokenFacts(completion: CompletionView, at: number): [string, string][] {
  if (!completion.sampled[at]) return [["", "an observation: not sampled, not trained"]];
  const generator = completion.generator_logprobs[at] ?? null;
  const trainer = completion.trainer_logprobs[at] ?? null;
  const facts: [string, string][] = [["generator", withChance(generator)]];
  facts.push(["trainer", trainer === null ? "not computed: the row taught nothing" : withChance(trainer)]);
  if (generator !== null && trainer !== null) facts.push(["difference", number(trainer - generator, 4)]);
  return facts;
}

function withChance(logprob: number | null): string {
  if (logprob === null) return "not known";
  const chance = Math.exp(logprob) * 100;
  return `${number(logprob, 4)} (${number(chance)} %)`;
}

/** The mean of what is known, or null. */
export function meanOf(values: readonly (number | null)[]): number | null {
  const known = values.filter((value): value is number => value !== null);
  return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
}

export interface Stretch {
  kind: "sampled" | "observed";
  /** Of the first piece, and behind the last. */
  start: number;
  end: number;
  /** From 1; of an observation the turn that it follows. */
  turn: number;
  reward: number | null;
  /** With credit by turn; else null. */
  advantage: number | null;
  finish_reason: string;
  /** Observed: whether the model sees this in place of all that stands before it. */
  begins_anew?: boolean;
}

/** A completion as what was sampled and what was observed, in order; one stretch where it has no turns. */
export function stretchesOf(completion: CompletionView): Stretch[] {
  const length = completion.pieces.length;
  const { finish_reason } = completion;
  const whole: Stretch = { kind: "sampled", start: 0, end: length, turn: 1, reward: null, advantage: null, finish_reason };
  if (!completion.turns) return [whole];
  const stretches: Stretch[] = [];
  let at = 0;
  completion.turns.forEach((turn, number) => {
    const { begins_anew } = turn;
    if (turn.start > at)
      stretches.push({ ...whole, kind: "observed", start: at, end: turn.start, turn: number, finish_reason: "", begins_anew });
    const { start, end, reward, advantage, finish_reason } = turn;
    stretches.push({ kind: "sampled", start, end, turn: number + 1, reward, advantage, finish_reason });
    at = end;
  });
  return stretches;
}
