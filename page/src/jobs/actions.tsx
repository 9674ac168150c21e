// What can be done to a job, with a question that names it.
import type { JSX } from "preact";
import { useState } from "preact/hooks";
import { ask, post } from "../api";
import { link } from "../router";
import type { JobStatus } from "../types";
import { Dialog } from "../ui/dialog";
import { FINAL } from "../ui/parts";

type Question = "cancel" | "resume" | "delete" | null;

export function JobActions({ job, little, onDone, onDeleted }: { job: JobStatus; little?: boolean; onDone: () => void; onDeleted?: () => void }): JSX.Element {
  const [question, setQuestion] = useState<Question>(null);
  const ended = FINAL.includes(job.state);
  const look = `button ${little ? "plain little" : ""}`;
  const close = (): void => {
    setQuestion(null);
    onDone();
  };
  return (
    <span class="row actions">
      {!ended && job.state !== "cancelling" && (
        <button type="button" class={look} onClick={() => setQuestion("cancel")} aria-label={`Cancel ${job.name}`}>
          Cancel
        </button>
      )}
      {ended && (
        <button type="button" class={look} onClick={() => setQuestion("resume")} aria-label={`Resume ${job.name}`}>
          Resume
        </button>
      )}
      <a class={look} href={link(["new"], { from: job.job_id })} aria-label={`Clone ${job.name}`}>
        Clone
      </a>
      {ended && (
        <button type="button" class={`${look} danger`} onClick={() => setQuestion("delete")} aria-label={`Delete ${job.name}`}>
          Delete
        </button>
      )}
      {question === "cancel" && <Cancel job={job} onClose={close} />}
      {question === "resume" && <Resume job={job} onClose={close} />}
      {question === "delete" && <Delete job={job} onClose={close} onDeleted={onDeleted} />}
    </span>
  );
}

const path = (job: JobStatus, verb = ""): string => `/v1/jobs/${encodeURIComponent(job.job_id)}${verb}`;

function Cancel({ job, onClose }: { job: JobStatus; onClose: () => void }): JSX.Element {
  return (
    <Dialog title={`Cancel “${job.name}”?`} action="Cancel the job" danger onDo={() => post(path(job, "/cancel"))} onClose={onClose}>
      <p class="quiet">It ends after a checkpoint, and can be resumed from there.</p>
    </Dialog>
  );
}

function Resume({ job, onClose }: { job: JobStatus; onClose: () => void }): JSX.Element {
  const [typed, setTyped] = useState(String(job.iterations));
  const iterations = Number(typed);
  const valid = /^\d+$/.test(typed.trim()) && iterations >= 1;
  const more = job.state === "succeeded" && iterations <= job.iterations;
  const body = iterations === job.iterations ? undefined : { iterations };
  return (
    <Dialog title={`Resume “${job.name}”?`} action="Resume the job" disabled={!valid || more} onDo={() => post(path(job, "/resume"), body)} onClose={onClose}>
      <div class="field">
        <label for="resume-iterations">Iterations in all</label>
        <input id="resume-iterations" type="text" inputMode="numeric" value={typed} aria-describedby="resume-help" aria-invalid={valid && !more ? undefined : "true"} onInput={(event) => setTyped(event.currentTarget.value)} />
        <p id="resume-help" class="help">
          {job.iterations_committed} of {job.iterations} are committed.
          {job.state === "succeeded" ? " A job that succeeded goes on if it gets more." : " It goes on from its newest checkpoint."}
        </p>
      </div>
    </Dialog>
  );
}

function Delete({ job, onClose, onDeleted }: { job: JobStatus; onClose: () => void; onDeleted?: (() => void) | undefined }): JSX.Element {
  const remove = async (): Promise<void> => {
    await ask<void>("DELETE", path(job));
    onDeleted?.();
  };
  return (
    <Dialog title={`Delete “${job.name}”?`} action="Delete for ever" danger onDo={remove} onClose={onClose}>
      <p class="quiet">
        Everything of <code>{job.job_id}</code> goes: its record, events, audit chain and run folder with its checkpoints. This can’t be taken back.
      </p>
    </Dialog>
  );
}
