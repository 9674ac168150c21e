// Work that a request or the clock starts: its queues, its workers, the newest tasks, and what starts by itself.
import type { JSX } from "preact";
import { useState } from "preact/hooks";
import { isAbsent, Table } from "../job/parts";
import { Plain } from "../job/plain";
import { useNow, useResource } from "../live";
import { link } from "../router";
import { CancelTask, TaskBadge, TaskBar } from "../tasks/parts";
import { requestOf, interval, isOpen, kindInWords, nextRun } from "../tasks/tasks";
import type { ClockEntry, ClockReport, QueueList, QueueSeen, TaskList, TaskStatus, TaskWorkerSeen } from "../types";
import { duration } from "../ui/format";
import { Age, Card, Digest, Failure } from "../ui/parts";

const EVERY_MS = 2000;
const CLOCK_EVERY_MS = 10_000;
const FIRST_SHOWN = 10;
const MOST_SHOWN = 100;

export function Tasks({ workers }: { workers: readonly TaskWorkerSeen[] }): JSX.Element | null {
  const [most, setMost] = useState(FIRST_SHOWN);
  // One more than is shown tells whether there are others.
  const tasks = useResource<TaskList>(`/v1/tasks?limit=${most + 1}`, { everyMs: EVERY_MS });
  const queues = useResource<QueueList>("/v1/queues", { everyMs: EVERY_MS });
  const clock = useResource<ClockReport>("/v1/clock", { everyMs: CLOCK_EVERY_MS });
  if (isAbsent(tasks.error) || isAbsent(queues.error)) return null;
  const listed = tasks.value?.tasks ?? [];
  return (
    <Card title="Tasks" class="tasks">
      <h3>Queues</h3>
      <Failure error={queues.error} />
      {queues.value && <Queues queues={queues.value.queues} />}
      <h3>Workers</h3>
      <Workers workers={workers} />
      <h3>Newest tasks</h3>
      <Failure error={tasks.error} />
      {tasks.value && listed.length === 0 && <p class="quiet">No task was asked for yet. Verify and Export on a job’s page start one.</p>}
      {listed.length > 0 && <Newest tasks={listed.slice(0, most)} onChange={tasks.reload} />}
      {listed.length > most && most < MOST_SHOWN && (
        <button type="button" class="button little" onClick={() => setMost(MOST_SHOWN)}>
          Show older tasks
        </button>
      )}
      <h3>Started by the clock</h3>
      {isAbsent(clock.error) ? <p class="quiet">This gateway shows no clock.</p> : <Failure error={clock.error} />}
      {clock.value && <Clock clock={clock.value} />}
    </Card>
  );
}

function Queues({ queues }: { queues: readonly QueueSeen[] }): JSX.Element {
  const forgotten = queues.filter((one) => one.waiting > 0 && one.workers === 0);
  return (
    <>
      <Table caption="Queues of tasks" heads={["Queue", "#Waiting", "#Oldest waits for", "#Running", "#Workers"]}>
        {queues.map(({ queue, waiting, oldest_s, running, workers }) => (
          <tr key={queue}>
            <td><Plain text={queue} /></td>
            <td class="num">{waiting}</td>
            <td class="num">{waiting ? duration(oldest_s) : "—"}</td>
            <td class="num">{running}</td>
            <td class="num">{workers}</td>
          </tr>
        ))}
      </Table>
      {forgotten.map(({ queue }) => (
        <p key={queue} class="note warn">
          Tasks wait in the queue <Plain text={queue} />, and no running worker takes from it: <code>onbeat up</code>, or the service{" "}
          <code>tasks</code>, starts one.
        </p>
      ))}
    </>
  );
}

function Workers({ workers }: { workers: readonly TaskWorkerSeen[] }): JSX.Element {
  if (!workers.length) {
    return (
      <p class="note">
        No worker of tasks is running. Exports and checks wait until one starts; training isn't affected.
      </p>
    );
  }
  return (
    <Table caption="Workers of tasks" heads={["Worker", "Host", "Takes from", "Runs", "#Last heartbeat"]}>
      {workers.map(({ worker_id, host, queues, running, seen_s }) => (
        <tr key={worker_id}>
          <td><Plain text={worker_id} /></td>
          <td><Plain text={host} /></td>
          <td><Plain text={queues.join(", ") || "—"} /></td>
          <td>{running.length ? <Plain text={running.join(", ")} /> : "idle"}</td>
          <td class="num">{duration(seen_s)} ago</td>
        </tr>
      ))}
    </Table>
  );
}

function Newest({ tasks, onChange }: { tasks: readonly TaskStatus[]; onChange: () => void }): JSX.Element {
  return (
    <Table caption="Newest tasks" heads={["Task", "Job", "Asked for by", "State", "Progress", "When", ""]}>
      {tasks.map((task) => <Row key={task.task_id} task={task} onChange={onChange} />)}
    </Table>
  );
}

function Row({ task, onChange }: { task: TaskStatus; onChange: () => void }): JSX.Element {
  const jobId = task.arguments?.job_id ?? "";
  const request = requestOf(task);
  return (
    <tr>
      <td>
        {kindInWords(task.kind)}
        {request && <span class="quiet small">, {request}</span>}
        <div class="faint small task-id"><Digest value={task.task_id} length={17} /></div>
      </td>
      <td class="nowrap">{jobId ? <a href={link(["jobs", jobId])}><Plain text={jobId} /></a> : "—"}</td>
      <td><Plain text={task.who} /></td>
      <td>
        <TaskBadge task={task} />
        {task.attempts > 1 && <span class="quiet small"> attempt {task.attempts}</span>}
        {task.reason && <div class={`small task-reason ${task.state === "failed" ? "bad-text" : "quiet"}`}><Plain text={task.reason} /></div>}
      </td>
      <td>{task.state === "running" ? <TaskBar task={task} /> : "—"}</td>
      <td>
        <Age at={task.created_s} />
        {task.ended_s > 0 && task.started_s > 0 && <div class="quiet small nowrap">took {duration(task.ended_s - task.started_s)}</div>}
      </td>
      <td>{isOpen(task) && <CancelTask task={task} onDone={onChange} />}</td>
    </tr>
  );
}

function Clock({ clock }: { clock: ClockReport }): JSX.Element {
  const now = useNow();
  return (
    <>
      {clock.holder ? (
        <p class="quiet">The clock is kept by <Plain text={clock.holder} />.</p>
      ) : (
        <p class="note warn">No process keeps the clock now: nothing is started by itself.</p>
      )}
      {clock.entries.length > 0 && (
        <Table caption="Started by the clock" heads={["Starts", "Every", "Started last", "Done last", "Next"]}>
          {clock.entries.map((entry) => <EntryRow key={entry.name} entry={entry} now={now} isKept={clock.holder !== ""} />)}
        </Table>
      )}
    </>
  );
}

function EntryRow({ entry, now, isKept }: { entry: ClockEntry; now: number; isKept: boolean }): JSX.Element {
  return (
    <tr>
      <td>{kindInWords(entry.kind)} <span class="faint small"><Plain text={entry.name} /></span></td>
      <td class="nowrap">{interval(entry.interval_s)}</td>
      <td>{entry.last_s ? <Age at={entry.last_s} /> : "not yet"}</td>
      <td>{entry.done_s ? <Age at={entry.done_s} /> : "not yet"}</td>
      <td class="nowrap">{isKept ? nextRun(entry, now) : "once the clock is kept"}</td>
    </tr>
  );
}
