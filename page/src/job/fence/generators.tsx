// The generators: which version each holds, how fast it is, what it does, and which of them are gone.
import type { JSX } from "preact";
import { useRef } from "preact/hooks";
import { useNow, useResource } from "../../live";
import type { GeneratorSeen, StreamReport } from "../../types";
import { age, duration, spoken } from "../../ui/format";
import { Table } from "../parts";
import { Plain } from "../plain";
import { doing, furtherInfo, known, speed, versionHeld } from "./readings";
import type { KnownGenerator, Presence } from "./readings";

const BADGE: Record<Presence, string> = { live: "good", silent: "warn", gone: "bad" };
const EVERY_MS = 2000;

export function Generators({ streams }: { streams?: StreamReport }): JSX.Element {
  const answer = useResource<{ generators: GeneratorSeen[] }>("/v1/generators", { everyMs: EVERY_MS });
  const seen = useRef<KnownGenerator[]>([]);
  const now = useNow();
  seen.current = known(seen.current, answer.value?.generators ?? streams?.generators ?? [], now);
  const batches = new Map((streams?.leases ?? []).map((lease) => [lease.generator_id, lease.batch_id]));
  return (
    <section class="card" aria-labelledby="generators-title">
      <div class="card-head">
        <h2 id="generators-title">Generators</h2>
        <p class="quiet small">of the whole stack; they sample any job</p>
      </div>
      {seen.current.length === 0 ? (
        <p class="note warn">No generator is running, so nothing is sampled until one starts.</p>
      ) : (
        <Table caption="Generators" heads={["Generator", "State", "Does", "Version held", "#Tokens/s", "#Last heartbeat"]}>
          {seen.current.map((generator) => (
            <Row key={generator.seen.worker_id} generator={generator} batchId={batches.get(generator.seen.worker_id)} now_s={now} />
          ))}
        </Table>
      )}
    </section>
  );
}

interface RowProps {
  generator: KnownGenerator;
  batchId: string | undefined;
  now_s: number;
}

function Row({ generator, batchId, now_s }: RowProps): JSX.Element {
  const { seen, presence } = generator;
  const isGone = presence === "gone";
  return (
    <tr class={isGone ? "generator-gone" : ""}>
      <td>
        <details class="generator-info">
          <summary><Plain text={seen.worker_id} /></summary>
          <dl>
            {furtherInfo(seen).map(([name, value]) => (
              <div key={name}><dt>{spoken(name)}</dt><dd><Plain text={value} /></dd></div>
            ))}
          </dl>
        </details>
      </td>
      <td><span class={`badge ${BADGE[presence]}`}>{presence}</span></td>
      <td>{isGone ? "—" : <Plain text={doing(seen, batchId)} />}</td>
      <td>{isGone ? "—" : versionHeld(seen)}</td>
      <td class="num">{isGone ? "—" : speed(seen)}</td>
      <td class="num">{isGone ? `gone, found ${age(now_s - (generator.gone_s ?? now_s))}` : `${duration(seen.seen_s)} ago`}</td>
    </tr>
  );
}
