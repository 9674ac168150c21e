// The form's walk over the schema against a validator of JSON schemas and against the gateway's own records, on the
// cases of tests/contract/make_spec_cases.py.
import { Ajv } from "ajv";
import { describe, expect, test } from "vitest";
import written from "../../../tests/contract/spec_cases.json";
import { faults, isTable, joined, type Json, type Schema, type Schemas, type Table } from "./schema";

type Verdict = "takes" | "refuses" | "rules_out";
type Case = { base: string; at: (string | number)[] } & Partial<Record<Verdict, Json[]>>;
type Base = { spec: Json } | { of: string; at: (string | number)[]; to: Json };

const { schemas, bases, cases } = written as unknown as { schemas: Schemas; bases: Record<string, Base>; cases: Case[] };
const ROOT: Schema = { $ref: "#/components/schemas/JobSpec" };
// Its code is made by `eval`, which the page's policy forbids, and a test doesn't.
const validator = new Ajv({ strict: false, allErrors: true }).addSchema({ $id: "api", components: { schemas } } as object).compile({ $ref: "api#/components/schemas/JobSpec" });

function expanded(value: Json): Json {
  if (!isTable(value) || !("$repeat" in value)) return value;
  const of = value.$repeat as Json;
  const times = value.times as number;
  if (typeof of === "string") return of.repeat(times);
  if (isTable(of) && "$of_key" in of) return Object.fromEntries(Array.from({ length: times }, (_, number) => [`${number}`, of.$of_key as Json]));
  return Array.from({ length: times }, () => of);
}

function changed(spec: Json, at: readonly (string | number)[], value: Json): Json {
  const made = structuredClone(spec);
  let target = made as Table;
  for (const key of at.slice(0, -1)) target = target[key] as Table;
  const key = at.at(-1) as string;
  if (isTable(value) && "$left_out" in value) delete target[key];
  // As JSON.parse does, also of `__proto__`.
  else Object.defineProperty(target, key, { value: expanded(value), enumerable: true, configurable: true, writable: true });
  return made;
}

function specOf(name: string): Json {
  const base = bases[name] as Base;
  return "spec" in base ? base.spec : changed(specOf(base.of), base.at, base.to);
}

function pathOf(at: readonly (string | number)[]): string {
  return at.reduce<string>((path, key) => joined(path, key), "");
}

describe.each(cases.map((one) => [`${one.base}: ${pathOf(one.at)}`, one] as const))("%s", (_, one) => {
  const spec = specOf(one.base);
  for (const verdict of ["takes", "refuses", "rules_out"] as const) {
    const values = one[verdict];
    if (!values) continue;
    test(verdict === "refuses" ? "the walk, the validator and the gateway refuse it, and the walk names it" : "the walk and the validator take what the schema takes", () => {
      for (const value of values) {
        const made = changed(spec, one.at, value);
        const found = faults(ROOT, made, schemas);
        const said = `${JSON.stringify(value)}: ${JSON.stringify(found)}`;
        expect([found.length === 0, validator(made)], said).toEqual([verdict !== "refuses", verdict !== "refuses"]);
        if (found.length) expect(found.every((fault) => fault.path.startsWith(pathOf(one.at))), said).toBe(true);
      }
    });
  }
});

test.each(Object.keys(bases).filter((name) => "spec" in (bases[name] as Base)))("%s of configs/ has no fault", (name) => {
  expect(faults(ROOT, specOf(name), schemas)).toEqual([]);
  expect(validator(specOf(name))).toBe(true);
});

test.each([[null], [[]], ["text"], [7]])("%j is no spec", (value) => {
  expect(faults(ROOT, value as Json, schemas)).toEqual([{ path: "", text: "must be a table" }]);
  expect(validator(value)).toBe(false);
});
