// What is seen of a task wherever one is shown: its badge, its bar, the question before it is cancelled.
import type { JSX } from "preact";
import { useState } from "preact/hooks";
import { ask } from "../api";
import { Plain } from "../job/plain";
import { useNow } from "../live";
import type { TaskStatus } from "../types";
import { Dialog } from "../ui/dialog";
import { duration, share } from "../ui/format";
import { Age } from "../ui/parts";
import { badgeOf, isOpen, kindInWords, mayCancel, measured } from "./tasks";
import "./tasks.css";

export const taskPath = (task: TaskStatus, part = ""): string => `/v1/tasks/${encodeURIComponent(task.task_id)}${part}`;

export function TaskBadge({ task }: { task: TaskStatus }): JSX.Element {
  const { tone, text } = badgeOf(task);
  return <span class={`badge ${tone}`}>{text}</span>;
}

/** A bar with its numbers; of what is not known yet, only that it is at work. */
export function Bar({ share: done, text, label }: { share: number | null; text: string; label: string }): JSX.Element {
  const percent = done === null ? null : Math.floor(done * 100);
  return (
    <span class="task-bar">
      <span
        class={`bar ${percent === null ? "unknown" : ""}`}
        role="progressbar"
        aria-label={label}
        aria-valuemin={0}
        aria-valuemax={100}
        aria-valuenow={percent ?? undefined}
        aria-valuetext={text || (done === null ? "at work" : share(done))}
      >
        <span style={{ width: `${percent ?? 100}%` }} />
      </span>
      <span class="small quiet">{text || (done === null ? "at work" : share(done))}</span>
    </span>
  );
}

export function TaskBar({ task }: { task: TaskStatus }): JSX.Element {
  const nothing = { files_done: 0, files_total: 0, bytes_done: 0, bytes_total: 0 };
  const progress = measured(task.progress ?? nothing);
  return <Bar {...progress} label={`Progress of: ${kindInWords(task.kind)}`} />;
}

/** A button that asks first. */
export function CancelTask({ task, onDone }: { task: TaskStatus; onDone: () => void }): JSX.Element | null {
  const [isAsked, setAsked] = useState(false);
  const name = kindInWords(task.kind);
  const close = (): void => {
    setAsked(false);
    onDone();
  };
  // A question stays open while the task ends: the answer of the gateway says so.
  if (!mayCancel(task) && !isAsked) return null;
  return (
    <>
      <button type="button" class="button little" aria-label={`Cancel: ${name}`} onClick={() => setAsked(true)}>
        Cancel
      </button>
      {isAsked && (
        <Dialog title={`Cancel “${name}”?`} action="Cancel the task" danger onDo={() => ask<void>("DELETE", taskPath(task))} onClose={close}>
          <p class="quiet">
            {task.state === "running" ? "It ends within some seconds, and what it has written goes." : "It has not begun, and won’t."} It can be
            started again.
          </p>
        </Dialog>
      )}
    </>
  );
}

/** A task that waits or runs: how far it is, since when, and a way to end it. */
export function OpenTask({ task, onDone }: { task: TaskStatus; onDone: () => void }): JSX.Element {
  const now = useNow();
  return (
    <div class="open-task">
      <div class="row">
        <TaskBadge task={task} />
        <span class="quiet small">
          {task.state === "queued"
            ? `has waited for a worker for ${duration(now - task.created_s)}`
            : `has run for ${duration(now - task.started_s)}`}
          {task.attempts > 1 && `, attempt ${task.attempts}`}; asked for by <Plain text={task.who} />
        </span>
        <CancelTask task={task} onDone={onDone} />
      </div>
      {task.state === "running" && <TaskBar task={task} />}
      {task.reason && <p class="note warn"><Plain text={task.reason} /></p>}
    </div>
  );
}

/** How a task ended that has no result to show: it failed, or was cancelled. */
export function EndedTask({ task }: { task: TaskStatus }): JSX.Element | null {
  if (task.state !== "failed" && task.state !== "cancelled") return null;
  return (
    <p class={`note ${task.state === "failed" ? "bad" : ""}`}>
      <strong>{task.state === "failed" ? "It failed" : "It was cancelled"}</strong>
      {task.attempts > 1 && ` in attempt ${task.attempts}`}
      {task.reason ? <>: <Plain text={task.reason} /></> : "."}
    </p>
  );
}

/** Who asked for a task that has ended, and when that was. It changes every second: no part of what is read out. */
export function Asked({ task }: { task: TaskStatus }): JSX.Element | null {
  if (isOpen(task)) return null;
  return (
    <p class="quiet small asked">
      Asked for by <Plain text={task.who} />, ended <Age at={task.ended_s} />
      {task.started_s > 0 && `, took ${duration(task.ended_s - task.started_s)}`}.
    </p>
  );
}
