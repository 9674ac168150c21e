// Server-sent events by fetch: EventSource can't send the key.
//
//   connect ─▶ read ─▶ events
//      ▲         │ ended, broke, or silent for SILENT_MS
//      └─ wait ◀─┘   0.5 s, doubled up to 10 s while nothing comes, after the newest id that was seen
//
// A tab that is not looked at holds no stream: a browser has six connections to a host, for all of its tabs.
import { Away, checked, keyed, reach, Refused, sawNone } from "./api";

const SILENT_MS = 40_000; // the gateway says at least a comment every 15 s
const FIRST_WAIT_MS = 500;
const LAST_WAIT_MS = 10_000;

export interface ServerEvent {
  id: string;
  name: string;
  data: string;
}

export interface Follow {
  onEvent: (event: ServerEvent) => void;
  /** The gateway refused for good: no key, no such job. Nothing more comes. */
  onRefused?: (refused: Refused) => void;
  /** Whether to ask again when the stream ends by itself. */
  again?: () => boolean;
  after?: string;
}

/** Follows until the returned function is called. */
export function follow(path: string, options: Follow): () => void {
  const stop = new AbortController();
  void run(path, options, stop.signal);
  return () => stop.abort();
}

async function run(path: string, options: Follow, stop: AbortSignal): Promise<void> {
  let after = options.after ?? "";
  let waitMs = FIRST_WAIT_MS;
  while (!stop.aborted) {
    await looked(stop);
    const hidden = new AbortController();
    const hide = (): void => (document.hidden ? hidden.abort() : undefined);
    document.addEventListener("visibilitychange", hide);
    try {
      for await (const event of events(path, after, AbortSignal.any([stop, hidden.signal]))) {
        waitMs = FIRST_WAIT_MS;
        if (event.id) after = event.id;
        options.onEvent(event);
      }
      if (options.again && !options.again()) return;
    } catch (error) {
      if (stop.aborted) return;
      if (hidden.signal.aborted) continue;
      if (error instanceof Refused && error.problem.status < 500) {
        options.onRefused?.(error);
        return;
      }
      if (!(error instanceof Away || error instanceof Refused)) sawNone();
    } finally {
      document.removeEventListener("visibilitychange", hide);
    }
    await pause(waitMs * (0.75 + Math.random() / 2), stop);
    waitMs = Math.min(waitMs * 2, LAST_WAIT_MS);
  }
}

async function* events(path: string, after: string, stop: AbortSignal): AsyncGenerator<ServerEvent> {
  const silent = new AbortController();
  let timer = setTimeout(() => silent.abort(), SILENT_MS);
  try {
    const headers = keyed(after ? { Accept: "text/event-stream", "Last-Event-ID": after } : { Accept: "text/event-stream" });
    const signal = AbortSignal.any([stop, silent.signal]);
    const response = await checked(await reach(path, { headers, signal }, stop));
    if (!response.body) throw new Away("the stream of the gateway is empty");
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    const parser = new Parser();
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      clearTimeout(timer);
      timer = setTimeout(() => silent.abort(), SILENT_MS);
      yield* parser.take(value);
    }
  } finally {
    clearTimeout(timer);
  }
}

/** https://html.spec.whatwg.org/multipage/server-sent-events.html#event-stream-interpretation */
export class Parser {
  private rest = "";
  private id = "";
  private name = "";
  private data: string[] = [];

  *take(text: string): Generator<ServerEvent> {
    const lines = (this.rest + text).split("\n");
    this.rest = lines.pop() ?? "";
    for (const raw of lines) {
      const line = raw.endsWith("\r") ? raw.slice(0, -1) : raw;
      if (line !== "") {
        this.field(line);
      } else if (this.data.length || this.name) {
        yield { id: this.id, name: this.name || "message", data: this.data.join("\n") };
        this.name = "";
        this.data = [];
      }
    }
  }

  private field(line: string): void {
    const colon = line.indexOf(":");
    const name = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
    if (name === "id") this.id = value;
    else if (name === "event") this.name = value;
    else if (name === "data") this.data.push(value);
  }
}

/** Waits until the tab is looked at. */
async function looked(stop: AbortSignal): Promise<void> {
  while (document.hidden && !stop.aborted) {
    await new Promise<void>((resolve) => {
      document.addEventListener("visibilitychange", () => resolve(), { once: true });
      stop.addEventListener("abort", () => resolve(), { once: true });
    });
  }
}

function pause(ms: number, stop: AbortSignal): Promise<void> {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, ms);
    stop.addEventListener("abort", () => (clearTimeout(timer), resolve()), { once: true });
  });
}
