// What a task is in words and numbers: its kind, its state, how far it has come, and what it was asked for.
import type { ClockEntry, TaskKind, TaskProgress, TaskState, TaskStatus } from "../types";
import { bytes, duration, plural, roughly } from "../ui/format";

export const KINDS: Record<TaskKind, string> = {
  verify: "Verify a job",
  export: "Export a model",
  backup: "Back up the stack",
  delete: "Remove files of a deleted job",
  remove_files: "See to run folders of ended jobs",
  clear_objects: "Remove objects that no job needs",
  forget: "Forget old jobs",
  verify_kept: "Verify all kept jobs",
};

const TONES: Record<TaskState, string> = { queued: "queued", running: "running", done: "good", failed: "bad", cancelled: "" };

/** Of a kind that a newer gateway has, its own name. */
export const kindInWords = (kind: TaskKind): string => KINDS[kind] ?? kind.replaceAll("_", " ");

export const isOpen = (task: TaskStatus): boolean => task.state === "queued" || task.state === "running";

/** Whether it can be asked to end, and was not asked yet. */
export const mayCancel = (task: TaskStatus): boolean => isOpen(task) && !task.is_cancelling;

/** The class of its badge, and what the badge says. */
export function badgeOf(task: Pick<TaskStatus, "state" | "is_cancelling">): { tone: string; text: string } {
  return task.is_cancelling ? { tone: "cancelling", text: "cancelling" } : { tone: TONES[task.state] ?? "", text: task.state };
}

export interface Measured {
  /** From 0 to 1; null where it is not known yet how much there is to do. */
  share: number | null;
  /** "3 of 12 files, 1.2 GB of 4.0 GB"; "" where nothing is known. */
  text: string;
}

/** By bytes where they are known: files are of any size. */
export function measured({ files_done, files_total, bytes_done, bytes_total }: TaskProgress): Measured {
  const parts = [
    files_total > 0 && `${files_done.toLocaleString("en")} of ${plural(files_total, "file")}`,
    bytes_total > 0 && `${bytes(bytes_done)} of ${bytes(bytes_total)}`,
  ];
  const [done, total] = bytes_total > 0 ? [bytes_done, bytes_total] : [files_done, files_total];
  return { share: total > 0 ? Math.min(1, done / total) : null, text: parts.filter(Boolean).join(", ") };
}

/** What tells it from others of its kind: "version 5, LoRA adapters"; "" where it was asked for nothing in particular. */
export function requestOf({ arguments: request }: TaskStatus): string {
  if (!request) return "";
  const parts = [request.best && "best held-out score", request.version !== null && `version ${request.version}`, request.adapters && "LoRA adapters"];
  return parts.filter(Boolean).join(", ");
}

/** "30 s", "15 min", "1 d": an interval without the zeros of `duration`. */
export function interval(seconds: number): string {
  return duration(seconds).replace(/ 0 (s|min|h)$/, "").replace(/\.0 s$/, " s");
}

/** When an entry of the clock runs next, seen at `now`. */
export function nextRun(entry: ClockEntry, now: number): string {
  const left = entry.next_s - now;
  return left > 0 ? `in ${roughly(left)}` : "now";
}
