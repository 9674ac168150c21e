// The end of the trainers' log, and what comes.
import type { JSX } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { get, key } from "../api";
import { asking } from "../asking";
import { useStore } from "../store";
import type { LogPart } from "../types";
import { bytes } from "../ui/format";
import { Empty, Failure } from "../ui/parts";
import { PlainBlock } from "./plain";
import { isFinal } from "./series";
import type { TabProps } from "./tab";

const END = 2 ** 53;
/** What is shown of the log at most, and what is asked for at once. */
const SHOWN_BYTES = 64 * 1024;
const EVERY_MS = 1000;
const ENDED_EVERY_MS = 10_000;

interface Seen {
  text: string;
  next: number;
  size: number;
}

export function Log({ jobId, status }: TabProps): JSX.Element {
  const [seen, setSeen] = useState<Seen | null>(null);
  const [error, setError] = useState<unknown>(null);
  const [shownBytes, setShownBytes] = useState(SHOWN_BYTES);
  const bearer = useStore(key);
  const isEnded = useRef(false);
  isEnded.current = isFinal(status.state);
  const box = useRef<HTMLDivElement>(null);
  const atEnd = useRef(true);
  useEffect(() => {
    if (!bearer) return;
    let log: Seen | null = null;
    const path = `/v1/jobs/${encodeURIComponent(jobId)}/log`;
    const looks = asking(async (stop) => {
      try {
        if (!log) {
          const { size } = await get<LogPart>(`${path}?after=${END}&limit=1`, { signal: stop });
          const start = Math.max(0, size - shownBytes);
          log = { text: "", next: start, size };
        }
        const part = await get<LogPart>(`${path}?after=${log.next}&limit=${shownBytes}`, { signal: stop });
        if (stop.aborted) return Infinity;
        const isOther = part.after < log.next; // of a job that was made again under an older server
        log = { text: cut((isOther ? "" : log.text) + part.text, shownBytes), next: part.next, size: part.size };
        setSeen(log);
        setError(null);
        if (part.next > part.after && part.next < part.size) return 0;
      } catch (failed) {
        if (!stop.aborted) setError(failed);
        throw failed;
      }
      return isEnded.current ? ENDED_EVERY_MS : EVERY_MS;
    });
    return () => looks.stop();
  }, [jobId, bearer, shownBytes]);
  useEffect(() => {
    if (atEnd.current && box.current) box.current.scrollTop = box.current.scrollHeight;
  }, [seen]);
  const isCut = seen !== null && seen.size > 1.5 * seen.text.length; // characters of up to four bytes are few in a log
  return (
    <section class="card" aria-labelledby="log-title">
      <div class="card-head">
        <h2 id="log-title">The trainers’ log</h2>
        {seen && (
          <span class="quiet small">
            {isCut && "the end of "}{bytes(seen.size)}, in a terminal: <code>onbeat watch {jobId} --log</code>
          </span>
        )}
      </div>
      <Failure error={error} />
      {isCut && (
        <button type="button" class="button little" onClick={() => setShownBytes(shownBytes * 4)}>
          Show more of it
        </button>
      )}
      {seen?.text ? (
        <div
          class="log-box"
          ref={box}
          tabIndex={0}
          role="log"
          aria-label="The trainers’ log"
          onScroll={({ currentTarget: at }) => (atEnd.current = at.scrollHeight - at.scrollTop - at.clientHeight < 24)}
        >
          <PlainBlock text={seen.text} class="log-text" />
        </div>
      ) : (
        !error && <Empty title={seen ? "No trainer has started yet" : "Waiting for the gateway"} />
      )}
    </section>
  );
}

/** Whole lines at the end, of about so many characters. */
function cut(text: string, most: number): string {
  if (text.length <= most) return text;
  const end = text.slice(-most);
  return end.slice(end.indexOf("\n") + 1);
}
