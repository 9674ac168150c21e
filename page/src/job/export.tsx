// Has a worker write a version as a Hugging Face folder, and brings it here as one file.
import type { JSX } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { useNow, useResource } from "../live";
import { download } from "../tasks/download";
import { useJobTask } from "../tasks/job_task";
import { Asked, Bar, EndedTask, OpenTask, taskPath } from "../tasks/parts";
import { requestOf, isOpen } from "../tasks/tasks";
import type { ExportedFiles, JobSpec, JobStatus, TaskStatus } from "../types";
import { bytes, date, plural } from "../ui/format";
import { Digest, Failure } from "../ui/parts";
import { Plain } from "./plain";

type Choice = "newest" | "best" | "number";

export function Export({ status }: { status: JobStatus }): JSX.Element {
  const path = `/v1/jobs/${encodeURIComponent(status.job_id)}`;
  const { task, error, isBusy, start, reload } = useJobTask(status.job_id, "export", `${path}/export`);
  const spec = useResource<JobSpec>(`${path}/spec`).value;
  const [choice, setChoice] = useState<Choice>("newest");
  const [typed, setTyped] = useState(String(status.policy_version));
  const [isAdapters, setAdapters] = useState(false);
  const isValid = choice !== "number" || /^\d{1,15}$/.test(typed.trim());
  const begin = (event: Event): void => {
    event.preventDefault();
    const version = choice === "number" ? Number(typed) : null;
    void start({ version, best: choice === "best", adapters: isAdapters });
  };
  return (
    <>
      <form class="export-form" onSubmit={begin}>
        <select aria-label="Version to export" value={choice} onChange={(event) => setChoice(event.currentTarget.value as Choice)}>
          <option value="newest">The newest version that is kept</option>
          <option value="best">The best held-out score</option>
          <option value="number">Version number…</option>
        </select>
        {choice === "number" && (
          <input
            type="text"
            inputMode="numeric"
            aria-label="Number of the version"
            value={typed}
            aria-invalid={isValid ? undefined : "true"}
            onInput={(event) => setTyped(event.currentTarget.value)}
          />
        )}
        {spec?.trainer?.lora && (
          <label class="row small quiet">
            <input type="checkbox" checked={isAdapters} onChange={(event) => setAdapters(event.currentTarget.checked)} />
            LoRA adapters alone
          </label>
        )}
        <button type="submit" class="button primary" disabled={isBusy || !isValid}>
          {isBusy ? "Exporting…" : "Export"}
        </button>
      </form>
      <Failure error={error} />
      {task && isOpen(task) && <OpenTask task={task} onDone={reload} />}
      <div role="status">
        {task && <EndedTask task={task} />}
        {task?.result?.exported && <Exported task={task} files={task.result.exported} />}
      </div>
      {task?.result?.exported && <Download key={task.task_id} jobId={status.job_id} task={task} files={task.result.exported} />}
      {task && <Asked task={task} />}
    </>
  );
}

function Exported({ task, files }: { task: TaskStatus; files: ExportedFiles }): JSX.Element {
  const request = requestOf(task);
  return (
    <p class="note good">
      <strong>Exported.</strong> Version {files.policy_version}
      {request && request !== `version ${files.policy_version}` && ` (${request})`}, {plural(Object.keys(files.files).length, "file")} of{" "}
      {bytes(files.num_bytes)}, digest <Digest value={files.weights_digest} length={12} />
      {files.has_chain ? ", which the audit chain has, too." : ". There was no audit chain to compare it with."}
    </p>
  );
}

function Download({ jobId, task, files }: { jobId: string; task: TaskStatus; files: ExportedFiles }): JSX.Element {
  const name = `${jobId}-v${files.policy_version}.tar`;
  const [done, setDone] = useState<number | null>(null);
  const [error, setError] = useState<unknown>(null);
  const [isSaved, setSaved] = useState(false);
  const stop = useRef(new AbortController());
  const now = useNow(5000);
  useEffect(() => () => stop.current.abort(), []);
  const run = async (): Promise<void> => {
    stop.current = new AbortController();
    const { signal } = stop.current;
    setDone(0);
    setError(null);
    setSaved(false);
    try {
      setSaved(await download(taskPath(task, "/files"), name, setDone, signal));
    } catch (failed) {
      if (!signal.aborted) setError(failed);
    }
    setDone(null);
  };
  if (files.until_s > 0 && now >= files.until_s && done === null)
    return <p class="quiet">It was kept until {date(files.until_s)}: export it again to download it.</p>;
  return (
    <>
      <div class="row download">
        {done === null ? (
          <button type="button" class="button" onClick={() => void run()}>
            Download {bytes(files.num_bytes)}
          </button>
        ) : (
          <>
            <button type="button" class="button" onClick={() => stop.current.abort()}>
              Stop the download
            </button>
            <Bar share={Math.min(1, done / Math.max(1, files.num_bytes))} text={`${bytes(done)} of ${bytes(files.num_bytes)}`} label="Progress of the download" />
          </>
        )}
        <span class="small">
          <Plain text={name} />
          {files.until_s > 0 && `, kept until ${date(files.until_s)}`}
        </span>
      </div>
      {isSaved && <p role="status">It is saved. Unpack it with <code>tar -xf {name}</code>.</p>}
      <Failure error={error} />
    </>
  );
}
