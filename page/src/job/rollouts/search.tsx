// Finds a text in what was recorded.
import type { JSX } from "preact";
import { useState } from "preact/hooks";
import { get } from "../../api";
import { link } from "../../router";
import { plural } from "../../ui/format";
import { Failure } from "../../ui/parts";
import { Plain } from "../plain";
import type { FoundText, FoundTexts } from "../../types";

const MOST = 50;

export function Search({ jobId }: { jobId: string }): JSX.Element {
  const [text, setText] = useState("");
  const [found, setFound] = useState<FoundTexts | null>(null);
  const [error, setError] = useState<unknown>(null);
  const [busy, setBusy] = useState(false);
  const search = async (event: Event): Promise<void> => {
    event.preventDefault();
    if (!text) return setFound(null);
    setBusy(true);
    try {
      const query = new URLSearchParams({ text, limit: String(MOST) });
      setFound(await get<FoundTexts>(`/v1/jobs/${encodeURIComponent(jobId)}/rollouts/search?${query}`, { deadlineMs: 60_000 }));
      setError(null);
    } catch (failed) {
      setError(failed);
    }
    setBusy(false);
  };
  return (
    <section class="card" aria-label="Search">
      <form class="row search-row" role="search" onSubmit={(event) => void search(event)}>
        <input type="search" aria-label="Text to find" placeholder="Find a text" maxLength={200} value={text}
          onInput={(event) => setText(event.currentTarget.value)} />
        <button type="submit" class="button" disabled={busy}>{busy ? "…" : "Find"}</button>
      </form>
      <Failure error={error} />
      <div role="status">
        {found && (
          <p class="quiet small">
            {found.texts.length === 0 ? "Nothing has it" : plural(found.texts.length, "text")}, of{" "}
            {plural(found.searched_iterations, "recorded iteration")}
            {!found.is_complete && "; the search ended at its bound"}
          </p>
        )}
      </div>
      {found && found.texts.length > 0 && (
        <ul class="found">{found.texts.map((one, at) => <Found key={at} jobId={jobId} one={one} />)}</ul>
      )}
    </section>
  );
}

function Found({ jobId, one }: { jobId: string; one: FoundText }): JSX.Element {
  const isPrompt = one.sample < 0;
  const place = { batch: one.batch_id, group: String(one.group), sample: isPrompt ? null : String(one.sample) };
  return (
    <li>
      <a href={link(["jobs", jobId, "rollouts"], place)}>
        <span class="small">{one.batch_id}, {isPrompt ? "prompt" : `sample ${one.sample}`}</span>
        <Plain text={one.excerpt} class="excerpt mono small" />
      </a>
    </li>
  );
}
