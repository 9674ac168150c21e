// A new job: the form, its text, and what the gateway says about it before it is one.
//
//   form ◀─▶ spec ◀─▶ text        spec ─ schema.ts ─▶ faults ─▶ the fields that they name
//              └─ POST /v1/jobs/check, when the schema has no fault and the typing pauses ─▶ a fault, with its cure
import type { JSX } from "preact";
import { useEffect, useMemo, useState } from "preact/hooks";
import { ask, get, post, Refused, words } from "../api";
import { useResource } from "../live";
import { go } from "../router";
import type { JobStatus, ProblemDetails } from "../types";
import { plural, spoken } from "../ui/format";
import { Failure } from "../ui/parts";
import { forgetDraft, idempotencyKey, keepDraft, keepEarlier, readDraft, readEarlier, START, type Draft } from "./draft";
import { Field, Form } from "./fields";
import { faults, isTable, resolved, told, type Fault, type Json, type Schema, type Schemas, type Table } from "./schema";

const PAUSE_MS = 500;
const OPEN = ["model", "dataset", "reward"];
const ROOT: Schema = { $ref: "#/components/schemas/JobSpec" };

interface OpenApi {
  components: { schemas: Schemas };
}

export function SubmitPage({ from }: { from: string | null }): JSX.Element {
  const api = useResource<OpenApi>("/openapi.json");
  const [draft, setDraft] = useState<Draft>(() => readDraft() ?? START);
  const [problem, setProblem] = useState<unknown>(null);
  const schemas = api.value?.components.schemas;
  const change = (next: Draft): void => {
    keepDraft(next);
    setDraft(next);
  };
  useClone(from, schemas, draft, change, setProblem);
  const found = useMemo(() => (schemas ? faults(ROOT, draft.spec, schemas) : []), [draft.spec, schemas]);
  const checked = useCheck(draft, found, Boolean(schemas));
  const marks = useMemo(() => marked(found, checked), [found, checked]);

  const submit = async (event: Event): Promise<void> => {
    event.preventDefault();
    try {
      const headers = { "Idempotency-Key": idempotencyKey(draft.spec) };
      const status = await ask<JobStatus>("POST", "/v1/jobs", { body: draft.spec, headers });
      forgetDraft();
      go(["jobs", status.job_id]);
    } catch (failed) {
      setProblem(failed);
      if (failed instanceof Refused) focusField(failed.problem.field);
    }
  };
  if (!schemas) return api.error ? <Failure error={api.error} /> : <p class="quiet">…</p>;
  const wrong = marks.size;
  return (
    <Form.Provider value={{ schemas, faults: marks }}>
      <form class="submit" onSubmit={(event) => void submit(event)} noValidate>
        <div class="head">
          <h1>New job</h1>
          <Earlier draft={draft} onBack={change} />
        </div>
        <div class="sections">
          <SpecForm schemas={schemas} spec={draft.spec} onChange={(spec) => change({ ...draft, spec, text: null, broken: false })} />
        </div>
        <aside class="beside">
          <SpecText draft={draft} onChange={change} />
          <Verdict wrong={wrong} marks={marks} checked={checked} />
          <Failure error={problem} />
          <button type="submit" class="button primary wide" disabled={draft.broken || found.length > 0}>
            Submit job
          </button>
        </aside>
      </form>
    </Form.Provider>
  );
}

/** Takes the spec of the job named in the address, once; a draft that was typed is kept beside it. */
function useClone(from: string | null, schemas: Schemas | undefined, draft: Draft, change: (draft: Draft) => void, fail: (error: unknown) => void): void {
  useEffect(() => {
    if (!from || !schemas || draft.from === from) return;
    const stop = new AbortController();
    get<Table>(`/v1/jobs/${encodeURIComponent(from)}/spec`, { signal: stop.signal })
      .then((spec) => {
        keepEarlier(readDraft());
        change({ spec: told(ROOT, spec, schemas) as Table, text: null, broken: false, from });
      })
      .catch((failed) => stop.signal.aborted || fail(failed));
    return () => stop.abort();
  }, [from, Boolean(schemas)]);
}

type Checked = "waiting" | "valid" | ProblemDetails | { away: string };

/** What the gateway says of a spec in which the schema finds nothing wrong; asked when the typing pauses. */
function useCheck(draft: Draft, found: Fault[], ready: boolean): Checked {
  const [checked, setChecked] = useState<Checked>("waiting");
  const body = JSON.stringify(draft.spec);
  useEffect(() => {
    setChecked("waiting");
    if (!ready || found.length || draft.broken) return;
    const stop = new AbortController();
    const timer = setTimeout(() => {
      post("/v1/jobs/check", draft.spec, { signal: stop.signal })
        .then(() => setChecked("valid"))
        .catch((failed) => {
          if (!stop.signal.aborted) setChecked(failed instanceof Refused ? failed.problem : { away: words(failed) });
        });
    }, PAUSE_MS);
    return () => {
      clearTimeout(timer);
      stop.abort();
    };
  }, [body, draft.broken, found.length, ready]);
  return checked;
}

function marked(found: Fault[], checked: Checked): Map<string, string> {
  const marks = new Map(found.map(({ path, text }) => [path, text]));
  if (typeof checked === "object" && "detail" in checked && checked.field)
    marks.set(checked.field, checked.detail + (checked.cure ? `; ${checked.cure}` : ""));
  return marks;
}

function focusField(path: string | null): void {
  if (path) document.getElementById(`field-${path}`)?.focus();
}

/** The root's own fields first, then a section a table; the ones that every job sets are open. */
function SpecForm({ schemas, spec, onChange }: { schemas: Schemas; spec: Table; onChange: (spec: Table) => void }): JSX.Element {
  const root = resolved(ROOT, schemas);
  const all = Object.entries(root.properties ?? {});
  const isSection = (schema: Schema): boolean => {
    const own = resolved(schema, schemas);
    return own.type === "object" || own.type === "array" || Boolean(own.anyOf);
  };
  const set = (name: string, value: Json | undefined): void => {
    const { [name]: _, ...rest } = spec;
    const order = all.map(([key]) => key).filter((key) => key === name || key in rest);
    const next = { ...rest, ...(value === undefined ? {} : { [name]: value }) };
    onChange(Object.fromEntries([...order, ...Object.keys(rest)].filter((key) => key in next).map((key) => [key, next[key] as Json])));
  };
  const field = ([name, schema]: [string, Schema]): JSX.Element => (
    <Field key={name} schema={schema} name={name} path={name} value={spec[name]} required={root.required?.includes(name) ?? false} onChange={(value) => set(name, value)} />
  );
  return (
    <>
      <section class="card">
        <div class="fields">{all.filter(([, schema]) => !isSection(schema)).map(field)}</div>
      </section>
      {all
        .filter(([, schema]) => isSection(schema))
        .map((entry) => (
          <Section key={entry[0]} name={entry[0]} schema={resolved(entry[1], schemas)} value={spec[entry[0]]}>
            {field(entry)}
          </Section>
        ))}
    </>
  );
}

function Section(props: { name: string; schema: Schema; value: Json | undefined; children: JSX.Element }): JSX.Element {
  const { name, schema, value } = props;
  const set = isTable(value) ? Object.keys(value).length : Array.isArray(value) ? value.length : 0;
  return (
    <details class="card section" open={OPEN.includes(name)}>
      <summary>
        <h2>{spoken(name)}</h2>
        <span class="faint small">{set ? `${set} set` : "defaults"}</span>
        <span class="quiet small about">{schema.description}</span>
      </summary>
      {props.children}
    </details>
  );
}

function SpecText({ draft, onChange }: { draft: Draft; onChange: (draft: Draft) => void }): JSX.Element {
  const shown = draft.text ?? JSON.stringify(draft.spec, null, 2);
  const take = (text: string): void => {
    try {
      const spec = JSON.parse(text) as Json;
      if (isTable(spec)) return onChange({ ...draft, spec, text, broken: false });
    } catch {
      // It is kept as a text until it is JSON.
    }
    onChange({ ...draft, text, broken: true });
  };
  return (
    <div class="field">
      <label for="spec-text">The same as JSON</label>
      <textarea id="spec-text" class="mono" rows={Math.min(24, shown.split("\n").length + 1)} spellcheck={false} aria-invalid={draft.broken ? "true" : undefined} value={shown} onInput={(event) => take(event.currentTarget.value)} />
      {draft.broken && (
        <p class="help">
          <strong class="fault">This is no JSON object yet; the form shows the last one.</strong>
        </p>
      )}
    </div>
  );
}

function Verdict({ wrong, marks, checked }: { wrong: number; marks: Map<string, string>; checked: Checked }): JSX.Element {
  if (typeof checked === "object" && "away" in checked) return <p class="note warn">{checked.away}: what you typed is kept.</p>;
  if (wrong)
    return (
      <div class="note bad" role="status">
        <p>{plural(wrong, "thing")} to mend</p>
        <ul class="mend">
          {[...marks].slice(0, 8).map(([path, text]) => (
            <li key={path}>
              <button type="button" class="copy" onClick={() => focusField(path)}>
                {path || "the spec"}
              </button>{" "}
              {text}
            </li>
          ))}
        </ul>
      </div>
    );
  if (typeof checked === "object") return <p class="note bad" role="status">{`${checked.detail}${checked.cure ? ` — ${checked.cure}` : ""}`}</p>;
  return (
    <p class={`note ${checked === "valid" ? "good" : ""}`} role="status">
      {checked === "valid" ? "The gateway would take it." : "…"}
    </p>
  );
}

function Earlier({ draft, onBack }: { draft: Draft; onBack: (draft: Draft) => void }): JSX.Element | null {
  const earlier = readEarlier();
  return (
    <span class="row small quiet">
      {draft.from && <span>Taken from {draft.from}</span>}
      {earlier && (
        <button type="button" class="button little" onClick={() => (keepEarlier(draft), onBack(earlier))}>
          Bring back what I had typed
        </button>
      )}
      <button type="button" class="button little" onClick={() => (keepEarlier(draft), onBack({ ...START }))}>
        Start over
      </button>
    </span>
  );
}
