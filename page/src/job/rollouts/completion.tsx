// One completion: its reward by component, its advantage, its tokens turn by turn, the columns of stages.
import type { JSX } from "preact";
import { useMemo, useState } from "preact/hooks";
import { number, plural, spoken } from "../../ui/format";
import { Plain } from "../plain";
import type { CompletionView } from "../../types";
import { toolCallsOf } from "./calls";
import { meanOf, stretchesOf } from "./heat";
import type { HeatMode, Stretch } from "./heat";
import { TokenFacts, Tokens } from "./tokens";

const COLUMN_VALUES_SHOWN = 12;

export function Completion({ completion, mode }: { completion: CompletionView; mode: HeatMode }): JSX.Element {
  const stretches = stretchesOf(completion);
  const sampled = completion.sampled.filter(Boolean).length;
  const surprise = meanOf(completion.generator_logprobs);
  const [at, setAt] = useState<number | null>(null);
  return (
    <article class="completion" id={`sample-${completion.sample}`} aria-label={`Sample ${completion.sample}`} tabIndex={-1}>
      <header class="completion-head">
        <span class="faint">#{completion.sample}</span>
        <span><span class="faint">reward</span> <strong>{number(completion.reward)}</strong></span>
        <Advantage value={completion.advantage} />
        <span class="quiet small">
          {plural(sampled, "token")}, {ended(completion)}
          {surprise !== null && `, mean log-prob ${number(surprise)}`}
        </span>
      </header>
      <Breakdown completion={completion} />
      {stretches.map((stretch) => (
        <StretchView key={stretch.start} stretch={stretch} isAlone={stretches.length === 1} {...{ completion, mode, at }} onAt={setAt} />
      ))}
      <TokenFacts completion={completion} at={at} />
      <Numbers title="Environment" values={completion.environment_metrics} />
      <Columns columns={completion.columns} />
    </article>
  );
}

function Advantage({ value }: { value: number | null }): JSX.Element {
  if (value === null) return <span class="faint">no advantage</span>;
  const side = value > 0 ? "up" : value < 0 ? "down" : "";
  return (
    <span>
      <span class="faint">advantage</span> <strong class={side}>{value > 0 ? "+" : ""}{number(value)}</strong>
    </span>
  );
}

const STOPS = {
  done: "done",
  failed: "ended where the environment failed",
  max_tokens: "ended by max_tokens",
  max_turns: "ended by max_turns",
  truncated: "cut by the environment",
};

function ended(completion: CompletionView): string {
  if (completion.turns && completion.stop) {
    return `${plural(completion.turns.length, "turn")}, ${STOPS[completion.stop]}`;
  }
  return completion.finish_reason === "length" ? "cut off at its length" : "stopped by itself";
}

/** Rewards by component, and what a component, the environment or a stage couldn't judge. */
function Breakdown({ completion }: { completion: CompletionView }): JSX.Element | null {
  const parts = Object.entries(completion.reward_breakdown);
  const unscorable = Object.entries(completion.unscorable);
  if (parts.length + unscorable.length === 0) return null;
  return (
    <ul class="breakdown small" aria-label="Rewards by component">
      {parts.map(([name, value]) => (
        <li key={name}><span class="faint"><Plain text={name} /></span> {number(value)}</li>
      ))}
      {unscorable.map(([name, why]) => (
        <li key={name} class="warn-text"><Plain text={name} />: unscorable, {spoken(why)}</li>
      ))}
    </ul>
  );
}

interface StretchProps {
  completion: CompletionView;
  stretch: Stretch;
  mode: HeatMode;
  isAlone: boolean;
  at: number | null;
  onAt: (at: number | null) => void;
}

function StretchView({ completion, stretch, mode, isAlone, at, onAt }: StretchProps): JSX.Element {
  const text = completion.pieces.slice(stretch.start, stretch.end).join("");
  const label = stretch.kind === "observed" ? `Observation after turn ${stretch.turn}` : `Turn ${stretch.turn}`;
  return (
    <section class={`stretch ${stretch.kind}`} aria-label={isAlone ? "Text" : label}>
      {!isAlone && (
        <p class="stretch-head small">
          <strong>{label}</strong>{" "}
          {stretch.kind === "observed" ? (
            <>
              <span class="tag">not trained</span>{" "}
              {stretch.begins_anew && <span class="quiet">begins anew: the model sees nothing of what stands above</span>}
            </>
          ) : (
            <span class="quiet">
              {stretch.reward !== null && `reward ${number(stretch.reward)}`}
              {stretch.advantage !== null && `, advantage ${number(stretch.advantage)}`}
              {stretch.finish_reason === "length" && ", cut off"}
            </span>
          )}
        </p>
      )}
      <Tokens label={isAlone ? "Completion" : label} {...{ completion, stretch, mode, at, onAt }} />
      {stretch.kind === "sampled" && <Calls text={text} isTurn={completion.turns !== null} />}
    </section>
  );
}

function Calls({ text, isTurn }: { text: string; isTurn: boolean }): JSX.Element | null {
  const calls = useMemo(() => toolCallsOf(text, { isTurn }), [text, isTurn]);
  if (calls.length === 0) return null;
  return (
    <ul class="calls small" aria-label="Tool calls">
      {calls.map((call, at) => (
        <li key={at}>
          <span class="tag" title="as its text has it: a record keeps no calls">{call.is_readable ? "calls" : "unreadable call"}</span>{" "}
          {call.is_readable && <strong class="mono"><Plain text={call.name} /></strong>}{" "}
          <code><Plain text={call.arguments} /></code>
        </li>
      ))}
    </ul>
  );
}

function Numbers({ title, values }: { title: string; values: Record<string, number> }): JSX.Element | null {
  const entries = Object.entries(values);
  if (entries.length === 0) return null;
  return (
    <ul class="breakdown small" aria-label={title}>
      {entries.map(([name, value]) => (
        <li key={name}><span class="faint"><Plain text={name} /></span> {number(value)}</li>
      ))}
    </ul>
  );
}

function Columns({ columns }: { columns: CompletionView["columns"] }): JSX.Element | null {
  const entries = Object.entries(columns);
  if (entries.length === 0) return null;
  return (
    <details class="columns small">
      <summary>{plural(entries.length, "column")} of stages</summary>
      <dl>
        {entries.map(([name, value]) => (
          <div key={name}>
            <dt class="faint"><Plain text={name} /></dt>
            <dd class="mono"><Plain text={shownValue(value)} /></dd>
          </div>
        ))}
      </dl>
    </details>
  );
}

function shownValue(value: number | string | (number | null)[]): string {
  if (typeof value === "string") return value;
  if (typeof value === "number") return number(value, 4);
  const first = value.slice(0, COLUMN_VALUES_SHOWN).map((one) => (one === null ? "—" : number(one, 4)));
  return `[${value.length}] ${first.join("  ")}${value.length > first.length ? "  …" : ""}`;
}
