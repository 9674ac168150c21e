// Keys and words are offered for the table at the cursor, as the schema of a spec has them.
import { EditorState } from "@codemirror/state";
import { json } from "@codemirror/lang-json";
import { ensureSyntaxTree } from "@codemirror/language";
import { expect, test } from "vitest";
import { filesAt, jsonPosition, optionsAt, tomlPosition, type Position, type Schemas } from "./completion";

const SCHEMAS: Schemas = {
  JobSpec: {
    type: "object",
    required: ["name"],
    properties: {
      name: { type: "string", description: "For people." },
      dataset: {
        anyOf: [{ $ref: "#/components/schemas/Addition" }, { $ref: "#/components/schemas/Rows" }],
        discriminator: { propertyName: "type", mapping: { addition: "#/components/schemas/Addition", jsonl: "#/components/schemas/Rows" } },
      },
      rollout: { $ref: "#/components/schemas/Rollout" },
      stages: { type: "array", items: { $ref: "#/components/schemas/Rows" } },
    },
  },
  Addition: { type: "object", required: ["type"], properties: { type: { enum: ["addition"] }, digits: { type: "integer", default: 2 } } },
  Rows: { type: "object", required: ["type"], properties: { type: { enum: ["jsonl"] }, path: { type: "string" } } },
  Rollout: { type: "object", properties: { sampling: { $ref: "#/components/schemas/Sampling" } } },
  Sampling: { type: "object", properties: { top_k: { type: "integer" }, kind: { enum: ["plain", "greedy"] }, seeded: { type: "boolean" } } },
};

/** The position at `|` in a text. */
function inToml(text: string): Position {
  return tomlPosition(EditorState.create({ doc: text.replace("|", "") }).doc, text.indexOf("|"));
}

function inJson(text: string): Position {
  const state = EditorState.create({ doc: text.replace("|", ""), extensions: json() });
  const tree = ensureSyntaxTree(state, state.doc.length)!;
  return jsonPosition(tree.resolveInner(text.indexOf("|"), -1), state.doc);
}

function labels(position: Position, spec = {}): string[] {
  return optionsAt(position, SCHEMAS, spec, false).map(({ label }) => label);
}

test.each<[string, Position]>([
  ["|", { table: [], key: null }],
  ["name = |", { table: [], key: "name" }],
  ["[rollout]\n|", { table: ["rollout"], key: null }],
  ["[rollout.sampling] # how\ntop_k = 1\nki|", { table: ["rollout", "sampling"], key: null }],
  ["[[stages]]\ntype = |", { table: ["stages"], key: "type" }],
  ["[rollout]\nsampling = { top_k = 5, |", { table: ["rollout", "sampling"], key: null }],
  ["[rollout]\nsampling = { kind = |", { table: ["rollout", "sampling"], key: "kind" }],
  ["rollout.sampling.kind = |", { table: ["rollout", "sampling"], key: "kind" }],
])("in the TOML %j the cursor is at %j", (text, position) => {
  expect(inToml(text)).toEqual(position);
});

test.each<[string, Position]>([
  ["{ | }", { table: [], key: null }],
  ['{"rollout": {"sampling": { | }}}', { table: ["rollout", "sampling"], key: null }],
  ['{"rollout": {"sampling": {"kind": "p|"}}}', { table: ["rollout", "sampling"], key: "kind" }],
  ['{"stages": [{"ty|": 1}]}', { table: ["stages"], key: null }],
])("in the JSON %j the cursor is at %j", (text, position) => {
  expect(inJson(text)).toEqual(position);
});

test("the keys of a table are offered with what they mean", () => {
  expect(labels({ table: [], key: null })).toEqual(["name", "dataset", "rollout", "stages"]);
  expect(optionsAt({ table: [], key: null }, SCHEMAS, {}, true)[0]).toMatchObject({ label: '"name"', detail: "required", info: "For people." });
  expect(labels({ table: ["stages"], key: null })).toEqual(["type", "path"]);
  expect(labels({ table: ["no", "such"], key: null })).toEqual([]);
  expect(labels({ table: ["constructor"], key: null })).toEqual([]);
});

test("a table of several kinds offers the keys of its own kind once it has one", () => {
  expect(labels({ table: ["dataset"], key: null })).toEqual(["type", "digits", "path"]);
  expect(labels({ table: ["dataset"], key: null }, { dataset: { type: "addition" } })).toEqual(["type", "digits"]);
});

test("the words of a key are offered, all kinds where it is the kind", () => {
  expect(labels({ table: ["rollout", "sampling"], key: "kind" })).toEqual(['"plain"', '"greedy"']);
  expect(labels({ table: ["rollout", "sampling"], key: "seeded" })).toEqual(["true", "false"]);
  expect(labels({ table: ["dataset"], key: "type" }, { dataset: { type: "addition" } })).toEqual(['"addition"', '"jsonl"']);
});

test("a key that names a model or a file of rows offers those of the stack", () => {
  const files = { models: ["models/tiny", "hub:a/b"], rows: ["sums.jsonl"], datasets: ["hub:a/sums"], is_complete: true };
  expect(filesAt({ table: ["model"], key: "path" }, files)).toMatchObject([{ label: '"models/tiny"' }, { label: '"hub:a/b"' }]);
  expect(filesAt({ table: ["dataset"], key: "path" }, files)).toMatchObject([{ label: '"hub:a/sums"' }]);
  expect(filesAt({ table: ["dataset"], key: "train_path" }, files)).toMatchObject([{ label: '"sums.jsonl"' }]);
  expect(filesAt({ table: [], key: "name" }, files)).toEqual([]);
  expect(filesAt({ table: ["model"], key: "path" }, null)).toEqual([]);
});
