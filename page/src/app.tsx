// The frame of every screen: where one is, whether the gateway answers, and its key where it asks for one.
import type { JSX } from "preact";
import { useState } from "preact/hooks";
import { awaySince, backendProblem, keyProblem, lateSince, useKey } from "./api";
import { JobPage } from "./job/page";
import { JobsPage } from "./jobs/page";
import { link, usePlace } from "./router";
import { useStore } from "./store";
import { StackPage } from "./stack/page";
import { clock } from "./ui/format";
import { Guard } from "./ui/guard";
import { lazy } from "./ui/lazy";
import { Empty } from "./ui/parts";
import mark from "./mark.svg";

/** Its editor is larger than the rest of the page. */
const SubmitPage = lazy(async () => (await import("./submit/page")).SubmitPage);

export function App(): JSX.Element {
  const place = usePlace();
  const problem = useStore(keyProblem);
  const [section = "jobs", jobId, tab] = place.path;
  return (
    <>
      <Banner />
      <div class="frame">
        <header class="top">
          <a class="brand" href="#/">
            <img src={mark} alt="" />
            Onbeat
          </a>
          <nav class="nav" aria-label="Screens">
            <a href={link(["jobs"])} aria-current={section === "jobs" ? "page" : undefined}>
              Jobs
            </a>
            <a href={link(["new"])} aria-current={section === "new" ? "page" : undefined}>
              New job
            </a>
            <a href={link(["stack"])} aria-current={section === "stack" ? "page" : undefined}>
              Stack
            </a>
          </nav>
        </header>
        {problem && <KeyPrompt problem={problem} />}
        <main>
          <Guard key={`${section} ${jobId ?? ""}`} name="This screen">
            {section === "new" ? (
              <SubmitPage from={place.query.get("from")} />
            ) : section === "stack" ? (
              <StackPage />
            ) : section === "jobs" && jobId ? (
              <JobPage key={jobId} jobId={jobId} tab={tab ?? "overview"} query={place.query} />
            ) : section === "jobs" ? (
              <JobsPage query={place.query} />
            ) : (
              <Empty title="There is no such screen">
                <a href="#/">All jobs</a>
              </Empty>
            )}
          </Guard>
        </main>
      </div>
    </>
  );
}

function Banner(): JSX.Element | null {
  const since = useStore(awaySince);
  const backend = useStore(backendProblem);
  const late = useStore(lateSince);
  if (since !== null)
    return (
      <div class="banner" role="status">
        The gateway does not answer since {clock(since / 1000)}, trying again. What you see is from before.
      </div>
    );
  if (backend)
    return (
      <div class="banner" role="status">
        {backend.detail}
        {backend.cure ? ` — ${backend.cure}` : ""}. What you see is from before.
      </div>
    );
  if (late !== null)
    return (
      <div class="banner" role="status">
        Waiting for an answer of the gateway since {clock(late / 1000)}. What you see is from before.
      </div>
    );
  return null;
}

function KeyPrompt({ problem }: { problem: string }): JSX.Element {
  const [typed, setTyped] = useState("");
  return (
    <form
      class="card key-prompt"
      onSubmit={(event) => {
        event.preventDefault();
        if (typed.trim()) useKey(typed.trim());
      }}
    >
      <h2>{problem}</h2>
      <p class="quiet">
        At a terminal <code>onbeat up</code> and <code>onbeat jobs</code> print this page’s address with the key in it. The key is also{" "}
        <code>api_key</code> in <code>stack.json</code> of the stack’s run folder (<code>runs/</code> unless <code>--run-dir</code> names
        another). It stays in this tab.
      </p>
      <div class="row key-row">
        <label class="unseen" for="key">
          Key of the gateway
        </label>
        <input
          id="key"
          type="password"
          autocomplete="off"
          placeholder="Key"
          value={typed}
          onInput={(event) => setTyped(event.currentTarget.value)}
        />
        <button class="button primary" type="submit">
          Open
        </button>
      </div>
    </form>
  );
}
