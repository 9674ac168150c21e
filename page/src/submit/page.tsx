// A new job: the text of its spec, and what the gateway says about it before it is submitted.
//
//   template ─┐
//   clone ────┴▶ draft ─▶ text ─ spec_text.ts ─▶ spec ─ check.ts ─▶ refusals ─▶ underlined in the text, listed beside it
//                         └ kept in this tab                └▶ POST /v1/jobs
import type { JSX } from "preact";
import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import { ask, get, key, Refused } from "../api";
import { useResource } from "../live";
import { go } from "../router";
import { useStore } from "../store";
import type { JobStatus, SpecFiles } from "../types";
import { plural } from "../ui/format";
import { Failure } from "../ui/parts";
import { isAboutSpec, refusalsOf, useCheck, type CheckResult, type SpecRefusal } from "./check";
import { specCompletion, type Schemas, type Sources } from "./completion";
import { FIRST_DRAFT, fitted, forgetDraft, idempotencyKey, keepDraft, keepEarlier, readDraft, readEarlier, type Draft } from "./draft";
import { Editor, type Marker } from "./editor";
import { lineOf, placeOfField, readSpecText, writeSpecText, type Language, type SpecText, type Table } from "./spec_text";
import { TEMPLATES } from "./templates";

/** The most refusals that are listed; all are underlined. */
const MOST_LISTED = 20;

interface OpenApi {
  components: { schemas: Schemas };
}

export function SubmitPage({ from }: { from: string | null }): JSX.Element {
  const [draft, setDraft] = useState<Draft>(() => readDraft() ?? FIRST_DRAFT);
  const [revision, setRevision] = useState(0);
  const [problem, setProblem] = useState<unknown>(null);
  const specText = useMemo(() => readSpecText(draft.text), [draft.text]);
  const check = useCheck(specText.spec);
  const findings = useMemo(() => findingsOf(specText, check), [specText, check]);
  const completion = useCompletion(specText);
  const goTo = useRef<(offset: number) => void>(() => {});

  const change = (next: Draft): void => {
    keepDraft(next);
    setDraft(next);
    setProblem(null);
  };
  const rewrite = (next: Draft): void => {
    change(next);
    setRevision((count) => count + 1);
  };
  /** Puts another text in place of the one that was typed, which can be brought back. */
  const replace = (next: Draft): void => {
    keepEarlier(readDraft());
    rewrite(next);
  };
  const isCloning = useClone(from, draft, replace, setProblem);
  useFitting(draft, rewrite);
  /** The address no longer names the job that was cloned: a reload keeps the text. */
  const begin = (next: Draft): void => {
    replace(next);
    go(["new"]);
  };

  const submit = async (): Promise<void> => {
    if (specText.spec === null || isCloning) return;
    try {
      const headers = { "Idempotency-Key": idempotencyKey(specText.spec) };
      const status = await ask<JobStatus>("POST", "/v1/jobs", { body: specText.spec, headers });
      forgetDraft();
      go(["jobs", status.job_id]);
    } catch (error) {
      setProblem(error);
      if (error instanceof Refused && isAboutSpec(error.problem)) {
        const field = refusalsOf(error.problem)[0]?.field;
        if (field) goTo.current(placeOfField(specText, field).from);
      }
    }
  };
  return (
    <form
      class="submit"
      onSubmit={(event) => {
        event.preventDefault();
        void submit();
      }}
    >
      <div class="head">
        <h1>New job</h1>
        <Beginnings draft={draft} onReplace={begin} />
      </div>
      <div class="card spec-card">
        <Editor
          label="Spec of the job"
          text={draft.text}
          revision={revision}
          markers={findings}
          completion={completion}
          onChange={(text) => change({ ...draft, text })}
          onSubmit={() => void submit()}
          onReady={(move) => (goTo.current = move)}
        />
      </div>
      <aside class="beside">
        {isCloning ? (
          <p class="note" role="status">
            Reading the spec of {from}…
          </p>
        ) : (
          <Verdict check={check} findings={findings} onGo={(offset) => goTo.current(offset)} />
        )}
        <Failure error={problem} />
        {/* A refused spec may be submitted: what it was refused for, as a folder that was missing, can have changed since. */}
        <button type="submit" class="button primary wide" disabled={specText.spec === null || isCloning}>
          Submit job
        </button>
        <LanguageChoice specText={specText} onChange={(text) => rewrite({ ...draft, text })} />
        <p class="help">
          A key that is left out has its default. Ctrl-Space lists the keys and values that may stand at the cursor, with what they mean, and the stack’s models
          and files of rows. F8 goes to the next refusal, and Ctrl-Enter submits.
        </p>
      </aside>
    </form>
  );
}

/**
 * Takes the spec of the job in the address, once. Keys with their defaults are left out; digests of files are kept.
 *
 * Returns true until the spec is here, or can't be had: the text on the screen is another job's until then, and
 * nobody who asked for a clone means to submit that.
 */
function useClone(from: string | null, draft: Draft, replace: (draft: Draft) => void, onError: (error: unknown) => void): boolean {
  const bearer = useStore(key);
  const [failed, setFailed] = useState<string | null>(null);
  useEffect(() => {
    if (!from || !bearer || draft.from === from) return;
    const stop = new AbortController();
    get<Table>(`/v1/jobs/${encodeURIComponent(from)}/spec?defaults=false`, { signal: stop.signal })
      .then((spec) => replace({ text: writeSpecText(spec, "toml"), from }))
      .catch((error) => {
        if (stop.signal.aborted) return;
        setFailed(from);
        onError(error);
      });
    return () => stop.abort();
  }, [from, bearer]);
  return from !== null && draft.from !== from && failed !== from;
}

/** Begins with a model that the stack has: a first look at this screen shows no refusal of a text that nobody typed. */
function useFitting(draft: Draft, rewrite: (draft: Draft) => void): void {
  const models = useResource<SpecFiles>("/v1/files").value?.models;
  // At once, not after the next frame: what is typed until then would be replaced.
  useLayoutEffect(() => {
    if (!models || draft !== FIRST_DRAFT) return;
    const fit = fitted(draft, models);
    if (fit !== draft) rewrite(fit);
  }, [models, draft]);
}

/** Offers keys by the schema of the gateway that runs, and its files; nothing until it has answered. */
function useCompletion(specText: SpecText): ReturnType<typeof specCompletion> {
  const api = useResource<OpenApi>("/openapi.json");
  const files = useResource<SpecFiles>("/v1/files");
  const sources = useRef<Sources>({ schemas: null, files: null, spec: {} });
  sources.current.schemas = api.value?.components.schemas ?? null;
  sources.current.files = files.value;
  // While a line is typed the text is often unreadable: the tables of the last readable one still say which kind they are.
  if (specText.spec) sources.current.spec = specText.spec;
  return useMemo(() => specCompletion(() => sources.current), []);
}

interface Finding extends Marker {
  line: number;
  field: string;
  problem: string;
  cure: string;
}

/** A fault of the text alone, or the gateway's refusals, each with its place in the text. */
function findingsOf(specText: SpecText, check: CheckResult): Finding[] {
  const { text } = specText;
  if (specText.fault) {
    const { problem, from, to } = specText.fault;
    return [{ line: lineOf(text, from), field: "", problem, cure: "", from, to, message: problem }];
  }
  if (check.state !== "refused") return [];
  return check.refusals.map((refusal) => {
    const { from, to } = placeOfField(specText, refusal.field);
    return { ...refusal, line: lineOf(text, from), from, to, message: sentenceOf(refusal) };
  });
}

function sentenceOf({ field, problem, cure }: SpecRefusal): string {
  const subject = field ? `${field}: ` : "";
  return `${subject}${problem}${cure ? `\nTo fix it: ${cure}` : ""}`;
}

function Verdict({ check, findings, onGo }: { check: CheckResult; findings: readonly Finding[]; onGo: (offset: number) => void }): JSX.Element {
  if (findings.length) {
    return (
      <div class="note bad" role="status">
        <p>{plural(findings.length, "thing")} to fix</p>
        <ul class="findings">
          {findings.slice(0, MOST_LISTED).map((finding) => (
            <li key={`${finding.field} ${finding.problem}`}>
              <button type="button" class="copy" onClick={() => onGo(finding.from)}>
                line {finding.line}
                {finding.field && `: ${finding.field}`}
              </button>{" "}
              {finding.problem}
              {finding.cure && <span class="cure">{finding.cure}</span>}
            </li>
          ))}
        </ul>
      </div>
    );
  }
  if (check.state === "unknown") {
    return (
      <p class="note warn" role="status">
        Not checked: {check.reason}. What you typed is kept.
      </p>
    );
  }
  const isValid = check.state === "valid";
  return (
    <p class={`note ${isValid ? "good" : ""}`} role="status">
      {isValid ? "The gateway accepts this spec." : "Checking…"}
    </p>
  );
}

/** What a new job begins with: a template, or what was typed before one was chosen. */
function Beginnings({ draft, onReplace }: { draft: Draft; onReplace: (draft: Draft) => void }): JSX.Element {
  const earlier = readEarlier();
  const begin = (id: string): void => {
    const template = TEMPLATES.find((candidate) => candidate.id === id);
    if (template) onReplace({ text: template.text, from: null });
  };
  return (
    <span class="row small quiet beginnings">
      {draft.from && <span>Cloned from {draft.from}</span>}
      {earlier && (
        <button type="button" class="button little" onClick={() => onReplace(earlier)}>
          Bring back the earlier text
        </button>
      )}
      <select aria-label="Begin from a template" value="" onChange={(event) => begin(event.currentTarget.value)}>
        <option value="">Begin from a template…</option>
        {TEMPLATES.map(({ id, title }) => (
          <option key={id} value={id}>
            {id} — {title}
          </option>
        ))}
      </select>
    </span>
  );
}

function LanguageChoice({ specText, onChange }: { specText: SpecText; onChange: (text: string) => void }): JSX.Element {
  const { language, spec } = specText;
  const choose = (next: Language): void => {
    if (spec && next !== language) onChange(writeSpecText(spec, next));
  };
  return (
    <div class="row small">
      <div class="segments" role="group" aria-label="Language of the text">
        {(["toml", "json"] as const).map((choice) => (
          <button key={choice} type="button" aria-pressed={choice === language} disabled={spec === null} onClick={() => choose(choice)}>
            {choice.toUpperCase()}
          </button>
        ))}
      </div>
      <span class="quiet">A change drops the comments.</span>
    </div>
  );
}
