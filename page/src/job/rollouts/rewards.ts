// Rewards of a batch as bars, and the orders in which groups and completions are read.
import { number } from "../../ui/format";
import type { CompletionView, GroupView } from "../../types";

/** More different rewards than these are counted by ranges. */
const MOST_VALUES = 10;

export interface Bar {
  /** "0.5", or "0.2 to 0.4" of a range, whose last one alone has its upper end. */
  label: string;
  /** Completions of the batch. */
  all: number;
  /** Those of the group that is shown. */
  here: number;
}

/** A bar for each reward where they are few, else for ten ranges of equal width; ascending. Those of `here` are among `all`. */
export function bars(all: readonly number[], here: readonly number[]): Bar[] {
  if (!all.length) return [];
  const values = [...new Set(all)].sort((a, b) => a - b);
  const low = values[0]!;
  const high = values.at(-1)!;
  const width = (high - low) / MOST_VALUES;
  const isFew = values.length <= MOST_VALUES;
  const places = isFew ? values : [...Array(MOST_VALUES).keys()].map((place) => low + place * width);
  const placeOf = (reward: number): number => (isFew ? values.indexOf(reward) : Math.min(MOST_VALUES - 1, Math.floor((reward - low) / width)));
  const found = places.map((from, place) => ({
    label: isFew ? number(from) : `${number(from)} to ${number(place === MOST_VALUES - 1 ? high : from + width)}`,
    all: 0,
    here: 0,
  }));
  for (const reward of all) found[placeOf(reward)]!.all += 1;
  for (const reward of here) found[placeOf(reward)]!.here += 1;
  return found;
}

export const ORDERS = ["sampled", "lowest", "highest"] as const;
export type Order = (typeof ORDERS)[number];
export const ORDER_NAMES: Record<Order, string> = { sampled: "as sampled", lowest: "lowest reward first", highest: "highest reward first" };

/** Those of equal rewards stay in the order in which they were sampled. */
export function ordered<T>(items: readonly T[], order: Order, reward: (item: T) => number): T[] {
  if (order === "sampled") return [...items];
  const sign = order === "lowest" ? 1 : -1;
  return [...items].sort((a, b) => sign * (reward(a) - reward(b)));
}

export function rewardsOf(group: GroupView): number[] {
  return group.completions.map((completion: CompletionView) => completion.reward);
}
