// Asks the gateway again and again, and holds no connection in between: a browser has six to a host for all its windows.
//
//   turn ─▶ answer ─▶ rest, as long as the turn says ─▶ turn …
//    ▲        └ none, or 5xx ─▶ rest 0.5 s, doubled up to 5 s
//    └─ wake() ends a rest; a tab that is not looked at rests until it is; a refusal rests until it is woken
import { Away, backendProblem, Refused } from "./api";

const FIRST_WAIT_MS = 500;
const LAST_WAIT_MS = 5_000;

/** Asks once, and answers after how many ms to ask again: Infinity waits to be woken. Throws what the gateway refused. */
export type Turn = (stop: AbortSignal) => Promise<number>;

export interface Asking {
  wake: () => void;
  stop: () => void;
}

export function asking(turn: Turn): Asking {
  const stop = new AbortController();
  const bell = new EventTarget();
  let isWoken = false;
  const wake = (): void => {
    isWoken = true;
    bell.dispatchEvent(new Event("ring"));
  };
  const run = async (): Promise<void> => {
    let waitMs = FIRST_WAIT_MS;
    while (!stop.signal.aborted) {
      await looked(stop.signal);
      if (stop.signal.aborted) return;
      isWoken = false;
      let restMs = Infinity;
      try {
        restMs = await turn(stop.signal);
        waitMs = FIRST_WAIT_MS;
        backendProblem.set(null);
      } catch (error) {
        if (stop.signal.aborted) return;
        if (error instanceof Away || (error instanceof Refused && error.problem.status >= 500)) {
          if (error instanceof Refused) backendProblem.set(error.problem);
          restMs = waitMs * (0.75 + Math.random() / 2);
          waitMs = Math.min(waitMs * 2, LAST_WAIT_MS);
        } else if (!(error instanceof Refused)) throw error;
      }
      if (!isWoken) await rest(restMs, bell, stop.signal);
    }
  };
  void run();
  return { wake, stop: () => stop.abort() };
}

/** Waits until the tab is looked at. */
async function looked(stop: AbortSignal): Promise<void> {
  while (document.hidden && !stop.aborted) await rest(Infinity, document, stop, "visibilitychange");
}

/** Waits so long, or for the event, or for the end. */
function rest(ms: number, bell: EventTarget, stop: AbortSignal, event = "ring"): Promise<void> {
  return new Promise((resolve) => {
    const over = new AbortController();
    const end = (): void => (over.abort(), clearTimeout(timer), resolve());
    const timer = Number.isFinite(ms) ? setTimeout(end, ms) : undefined;
    bell.addEventListener(event, end, { signal: over.signal });
    stop.addEventListener("abort", end, { signal: over.signal });
  });
}
