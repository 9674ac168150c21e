// What happened to the job, the newest first; what a person should look at stands out.
import type { JSX } from "preact";
import { useState } from "preact/hooks";
import { clock, date, number, plural, spoken } from "../ui/format";
import type { EvaluationScore, HealthProblem } from "../types";
import { restarts, type Told } from "./series";

const FIRST_SHOWN = 12;
const ALARMS: Record<string, string> = { mismatch_alarm: "warn", batch_dead: "bad", rewound: "warn" };

export function Events({ events, numReclaimed, isToCome }: { events: Told[]; numReclaimed: number; isToCome: boolean }): JSX.Element {
  const [all, setAll] = useState(false);
  const [alarmsOnly, setAlarmsOnly] = useState(false);
  const later = restarts(events);
  const tone = (event: Told): string => (later.has(event.id) ? "warn" : toneOf(event));
  const chosen = events.filter((event) => !alarmsOnly || tone(event)).reverse();
  const numAlarms = events.filter(tone).length;
  const shown = all ? chosen : chosen.slice(0, FIRST_SHOWN);
  return (
    <section class="card of-events">
      <div class="card-head">
        <h2>Events</h2>
        {numAlarms > 0 && (
          <label class="row small quiet">
            <input type="checkbox" checked={alarmsOnly} onChange={(event) => setAlarmsOnly(event.currentTarget.checked)} />
            Alarms only ({numAlarms})
          </label>
        )}
      </div>
      {numReclaimed > 0 && (
        <p class="note warn">
          {plural(numReclaimed, "batch was", "batches were")} taken over from generators that were killed, or sent no heartbeat in time.
        </p>
      )}
      {shown.length === 0 && <p class="quiet">{isToCome ? "…" : "Nothing yet."}</p>}
      <ol class="events">
        {shown.map((event) => (
          <li key={event.id}>
            <time class="faint small nowrap" title={date(event.at_s)}>
              {clock(event.at_s)}
            </time>
            <span class={`badge ${tone(event)}`}>{spoken(event.type)}</span>
            <span class="quiet">{sentenceOf(event, later.has(event.id))}</span>
          </li>
        ))}
      </ol>
      {!all && chosen.length > FIRST_SHOWN && (
        <button type="button" class="button little" onClick={() => setAll(true)}>
          Show all {chosen.length}
        </button>
      )}
    </section>
  );
}

function toneOf(event: Told): string {
  if (event.type === "state_changed" && event.state === "failed") return "bad";
  if (event.type === "task_changed" && event.state === "failed") return "bad";
  if (event.type === "health_changed") return (event.problems as HealthProblem[]).length ? "warn" : "";
  if (event.type === "generators_changed") return (event.gone as string[]).length ? "warn" : "";
  return ALARMS[event.type] ?? "";
}

/** The event's fields as a sentence; of one that is not known here, its fields as they are. */
function sentenceOf(event: Told, isLater: boolean): string {
  const text = (name: string): string => String(event[name] ?? "");
  const value = (name: string): string => number(Number(event[name]));
  switch (event.type) {
    case "state_changed":
      return [
        text("state"),
        event.by && event.by !== "the operator" ? ` by ${text("by")}` : "",
        event.reason ? `: ${text("reason")}` : "",
        Array.isArray(event.changes) && event.changes.length ? ` (${event.changes.join("; ")})` : "",
      ].join("");
    case "trainer_started": {
      const passes = event.passes ? `; ${text("passes")}` : "";
      return isLater
        ? `goes on at iteration ${text("next_iteration")} where the trainer before it ended, or was killed${passes}`
        : `begins at iteration ${text("next_iteration")}${passes}`;
    }
    case "memory_measured": {
      const gib = (name: string): string => number(Number(event[name]) / 2 ** 30);
      return `the largest micro-batch of this spec, ${Number(event.num_tokens).toLocaleString("en")} tokens, takes ${gib("peak_bytes")} GiB at the peak, of ${gib("usable_bytes")} GiB (${text("device")})`;
    }
    case "rewound":
      return Number(event.committed) >= Number(event.iteration)
        ? `to iteration ${text("iteration")}: what was trained up to ${text("committed")} is done again`
        : `to iteration ${text("iteration")}: what was in work is sampled anew`;
    case "health_changed": {
      const problems = (event.problems as HealthProblem[]).map((one) => `${spoken(one.rule)}: ${one.problem}`);
      return problems.join("; ") || `well again after iteration ${text("iteration")}`;
    }
    case "generators_changed": {
      const [came, gone] = [event.came as string[], event.gone as string[]];
      const parts = [came.length && `came: ${came.join(", ")}`, gone.length && `gone: ${gone.join(", ")}`].filter(Boolean);
      return `${parts.join("; ")} (${text("num_live")} live)`;
    }
    case "checkpoint_written":
      return `after iteration ${text("iteration")}`;
    case "batch_dead":
      return `${text("batch_id")}: ${text("reason")}`;
    case "task_changed":
      return event.state === "queued"
        ? `${text("kind")} asked for by ${text("by")}`
        : `${text("kind")} ${text("state")}${event.reason ? `: ${text("reason")}` : ""}`;
    case "mismatch_alarm":
      return `iteration ${text("iteration")}: k3 ${value("mismatch_k3")} is above ${value("threshold")}; the largest difference is ${value("mismatch_max")}`;
    case "evaluation_finished": {
      const score = event.score as EvaluationScore;
      const sets = Object.entries(score.sets ?? {}).map(([name, of]) => `; ${name}: ${number(of.sampled)}`);
      const greedy = score.greedy === null ? "" : `, greedy ${number(score.greedy)}`;
      return `iteration ${score.iteration}: sampled ${number(score.sampled)}${greedy} on ${score.num_prompts} prompts${sets.join("")}`;
    }
    default: {
      const { id: _id, type: _type, at_s: _at, ...rest } = event;
      return Object.entries(rest)
        .map(([name, field]) => `${spoken(name)} ${typeof field === "object" ? JSON.stringify(field) : String(field)}`)
        .join(", ");
    }
  }
}
