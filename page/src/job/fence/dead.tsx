// Dead letters: the batches that were given up, with what they asked and a way to try again.
import type { JSX } from "preact";
import { useState } from "preact/hooks";
import { post } from "../../api";
import { useResource } from "../../live";
import type { JobStatus } from "../../types";
import { plural } from "../../ui/format";
import { Dialog } from "../../ui/dialog";
import { Age, Failure } from "../../ui/parts";
import { isAbsent } from "../parts";
import { Plain, PlainBlock } from "../plain";
import type { DeadLetter } from "../../types";

const PROMPTS_SHOWN = 20;

export interface DeadProps {
  jobId: string;
  status: JobStatus;
  /** Asked again when it changes. */
  numDead: number;
}

export function DeadLetters({ jobId, status, numDead }: DeadProps): JSX.Element {
  const path = `/v1/jobs/${encodeURIComponent(jobId)}/dead?limit=100`;
  const dead = useResource<{ letters: DeadLetter[] }>(path, { again: `${numDead} ${status.state}` });
  const [chosen, setChosen] = useState<DeadLetter | null>(null);
  const letters = dead.value?.letters ?? [];
  const retry = async (): Promise<void> => {
    if (chosen) await post(`/v1/jobs/${encodeURIComponent(jobId)}/dead/${encodeURIComponent(chosen.entry_id)}/retry`);
    dead.reload();
  };
  return (
    <section class="card" aria-labelledby="dead-title">
      <h2 id="dead-title">Dead letters</h2>
      {isAbsent(dead.error) ? <p class="quiet">This gateway shows no dead letters.</p> : <Failure error={dead.error} />}
      {dead.value && letters.length === 0 && <p class="quiet">No batch was given up.</p>}
      <ul class="letters">
        {letters.map((letter) => <Letter key={letter.entry_id} letter={letter} onRetry={() => setChosen(letter)} />)}
      </ul>
      {chosen && (
        <Dialog title={`Sample ${chosen.batch_id} again?`} action="Retry" onDo={retry} onClose={() => setChosen(null)}>
          <p>
            The job <strong><Plain text={status.name} /></strong> is queued again. It goes on from its newest checkpoint, and
            the batch is sampled anew.
          </p>
        </Dialog>
      )}
    </section>
  );
}

function Letter({ letter, onRetry }: { letter: DeadLetter; onRetry: () => void }): JSX.Element {
  const prompts = letter.prompts.slice(0, PROMPTS_SHOWN);
  return (
    <li class="letter">
      <div class="card-head">
        <h3>Batch {letter.batch_id}</h3>
        <span class="quiet small">
          <Age at={letter.at_s} />
          {letter.attempts > 0 && `, after ${plural(letter.attempts, "attempt")}`}
        </span>
      </div>
      <PlainBlock text={letter.reason} class="letter-reason" />
      {letter.prompts.length === 0 ? (
        <p class="quiet small">Its prompts are not kept.</p>
      ) : (
        <details>
          <summary>{plural(letter.prompts.length, "prompt")}</summary>
          {prompts.map((prompt) => (
            <figure key={prompt.prompt_id} class="letter-prompt">
              <figcaption class="faint small"><Plain text={prompt.prompt_id} /></figcaption>
              <PlainBlock text={prompt.text} />
            </figure>
          ))}
          {prompts.length < letter.prompts.length && <p class="quiet small">and {letter.prompts.length - prompts.length} more</p>}
        </details>
      )}
      <div class="row">
        <button type="button" class="button little" disabled={!letter.can_retry} onClick={onRetry}>Retry</button>
        {!letter.can_retry && <span class="quiet small"><Plain text={letter.why_not} /></span>}
      </div>
    </li>
  );
}
