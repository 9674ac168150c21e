// Every number of one iteration: the one under the cursor, or the newest.
import type { JSX } from "preact";
import type { JobStatus } from "../types";
import { date, number, spoken } from "../ui/format";
import { headsOf } from "./heads";
import { numbersAt, type Story } from "./series";

/** Numbers that are 0 but for rounding in many jobs, and why. */
const ROUNDED: Record<string, string> = {
  advantage_mean: "The advantages of a group add up to 0, but for rounding",
  loss: "With one on-policy step the loss is 0 by construction, but for rounding; its gradient is not",
};
/** Far below what any of them is where it means something. */
const ROUNDING = 1e-7;

export interface ReadoutProps {
  iteration: number;
  runs: { status: JobStatus; story: Story }[];
  isHovered: boolean;
}

export function Readout({ iteration, runs, isHovered }: ReadoutProps): JSX.Element {
  const columns = runs.map(({ story }) => {
    const place = story.iterations.indexOf(iteration);
    const score = story.evaluations.find((one) => one.iteration === iteration);
    const found = new Map<string, number>();
    if (score) found.set("held-out, sampled", score.sampled);
    if (score?.greedy != null) found.set("held-out, greedy", score.greedy);
    for (const [name, of] of Object.entries(score?.sets ?? {})) {
      found.set(`held-out: ${name}, sampled`, of.sampled);
      if (of.greedy !== null) found.set(`held-out: ${name}, greedy`, of.greedy);
    }
    for (const [name, value] of numbersAt(story, place)) found.set(name, value);
    return { started: story.columns.get("started_s")?.[place], found };
  });
  const names = [...new Set(columns.flatMap(({ found }) => [...found.keys()]))];
  const started = columns[0]?.started;
  const heads = headsOf(runs.map(({ status }) => status));
  return (
    <aside class="card readout" aria-label="Numbers of one iteration">
      <div class="card-head">
        <h2>{iteration < 0 ? "No iteration" : `Iteration ${iteration}`}</h2>
        {iteration >= 0 && <span class="small faint">{isHovered ? "under the cursor" : runs.length > 1 ? "the newest of all" : "the newest"}</span>}
      </div>
      {started != null && <p class="small quiet when">{date(started)}</p>}
      <div class="scroll">
        <table class="small">
          {runs.length > 1 && (
            <thead>
              <tr>
                <th />
                {runs.map(({ status }, index) => (
                  <th key={status.job_id} class="num">
                    <span class={`key-of c${(index % 6) + 1}`} title={`${status.name}, ${status.job_id}`}>
                      {heads[index]}
                    </span>
                  </th>
                ))}
              </tr>
            </thead>
          )}
          <tbody>
            {names.map((name) => (
              <tr key={name}>
                <td class="quiet">{spoken(name)}</td>
                {columns.map(({ found }, index) => (
                  <td key={index} class="num">
                    {found.has(name) ? <Value name={name} value={found.get(name)!} /> : <span class="faint">—</span>}
                  </td>
                ))}
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </aside>
  );
}

function Value({ name, value }: { name: string; value: number }): JSX.Element {
  const why = ROUNDED[name];
  if (why && value !== 0 && Math.abs(value) < ROUNDING) return <span class="faint" title={`${value}. ${why}.`}>≈ 0</span>;
  return <>{number(value)}</>;
}
