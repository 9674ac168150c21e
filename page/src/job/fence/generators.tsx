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
  const asked = useResource<{ generators: GeneratorSeen[] }>("/v1/generators", { everyMs: EVERY_MS });
  const seen = useRef<KnownGenerator[]>([]);
  const now = useNow();
  seen.current = known(seen.current, asked.value?.generators ?? streams?.generators ?? [], now);
  const held = new Map((streams?.leases ?? []).map((lease) => [lease.generator_id, lease.batch_id]));
  return (
    <section class="card" aria-labelledby="generators-title">
      <div class="card-head">
        <h2 id="generators-title">Generators</h2>
        <p class="quiet small">of the whole stack; they sample any job</p>
      </div>
      {seen.current.length === 0 ? (
        <p class="note warn">No generator lives: nothing is sampled until one starts.</p>
      ) : (
        <Table caption="Generators" heads={["Generator", "State", "Does", "Version held", "#Tokens/s", "#Last heartbeat"]}>
          {seen.current.map((one) => (
            <Row key={one.seen.worker_id} one={one} held={held.get(one.seen.worker_id)} now_s={now} />
          ))}
        </Table>
      )}
    </section>
  );
}

interface RowProps {
  one: KnownGenerator;
  held: string | undefined;
  now_s: number;
}

function Row({ one, held, now_s }: RowProps): JSX.Element {
  const { seen, presence } = one;
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
      <td>{isGone ? "—" : <Plain text={doing(seen, held)} />}</td>
      <td>{isGone ? "—" : versionHeld(seen)}</td>
      <td class="num">{isGone ? "—" : speed(seen)}</td>
      <td class="num">{isGone ? `gone, found ${age(now_s - (one.gone_s ?? now_s))}` : `${duration(seen.seen_s)} ago`}</td>
    </tr>
  );
}
