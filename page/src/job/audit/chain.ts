// The chain as it is read: newest first, a few at a time.
import { number, plural } from "../../ui/format";
import type { AuditChain, AuditRecord } from "../../types";

/** A record with the digest that the next one names as `previous`. */
export type ChainLink = AuditChain["records"][number];

/** A part of the chain that the gateway answers oldest first. */
export function newestFirst<T>(records: readonly T[]): T[] {
  return [...records].reverse();
}

/** A record in half a sentence. */
export function describe(record: AuditRecord): string {
  if (record.kind === "rewind") return `a trainer, by its lease ${record.trainer_epoch}, went on from an older checkpoint`;
  const given_up = Object.keys(record.abandoned).length;
  const parts = [plural(Object.keys(record.batches).length, "batch", "batches")];
  if (record.next_weights_digest) parts.push(`reward ${number(record.reward_mean)}`);
  if (given_up) parts.push(`${given_up} given up`);
  parts.push(record.next_weights_digest ? `version ${record.policy_version} → ${record.policy_version + 1}` : "evaluated only");
  return parts.join(", ");
}
