// A spec is read from TOML and JSON alike, and each key and entry has its place in the text.
import { describe, expect, test } from "vitest";
import { lineOf, placeOfField, readSpecText, writeSpecText, type Table } from "./spec_text";
import { TEMPLATES } from "./templates";

const TOML = `# a comment with 😀
name = "sums"
model.path = "tiny"
[rollout]
sampling = { max_new_tokens = 5, top_k = 7 }
[reward]
components = [
  { type = "exact" },
  { type = "length", weight = 0.5 },
]
[[stages]]
type = "teacher"
name = "big"
[[stages]]
type = "llm_judge"
[stages.criteria]
right = 1.0
`;
const SPEC: Table = {
  name: "sums",
  model: { path: "tiny" },
  rollout: { sampling: { max_new_tokens: 5, top_k: 7 } },
  reward: { components: [{ type: "exact" }, { type: "length", weight: 0.5 }] },
  stages: [{ type: "teacher", name: "big" }, { type: "llm_judge", criteria: { right: 1.0 } }],
};

function textAt(text: string, field: string): string {
  const { from, to } = placeOfField(readSpecText(text), field);
  return text.slice(from, to);
}

test("TOML and JSON of the same spec have the same value", () => {
  expect(plain(readSpecText(TOML).spec)).toEqual(SPEC);
  expect(plain(readSpecText(JSON.stringify(SPEC)).spec)).toEqual(SPEC);
});

test("a spec that is written in either language is read as the same spec", () => {
  for (const language of ["toml", "json"] as const) {
    const written = readSpecText(writeSpecText(SPEC, language));
    expect(written.language).toBe(language);
    expect(plain(written.spec)).toEqual(SPEC);
  }
  expect(readSpecText(writeSpecText({ name: null }, "toml")).language, "TOML has no null").toBe("json");
});

describe.each([
  ["name", 'name = "sums"', '"name": "sums"'],
  ["model.path", 'model.path = "tiny"', '"path": "tiny"'],
  ["model", 'model.path = "tiny"', '"model"'],
  ["rollout.sampling.top_k", "top_k = 7", '"top_k": 7'],
  ["reward.components[1].weight", "weight = 0.5", '"weight": 0.5'],
  ["reward.components[1]", '{ type = "length", weight = 0.5 }', "{"],
  ["stages[0].name", 'name = "big"', '"name": "big"'],
  ["stages.big.name", 'name = "big"', '"name": "big"'],
  ["stages.llm_judge.criteria.right", "right = 1.0", '"right": 1'],
  ["rollout.sampling.min_p", "sampling = { max_new_tokens = 5, top_k = 7 }", '"sampling"'],
  ["rollout.group_size", "rollout", '"rollout"'],
  ["stages[9].name", "stages", '"stages"'],
  ["iterations", "# a comment with 😀", "{"],
  ["", "# a comment with 😀", "{"],
])("the field %s", (field, inToml, inJson) => {
  test("has its place in TOML", () => expect(textAt(TOML, field)).toBe(inToml));
  test("has its place in JSON", () => expect(textAt(JSON.stringify(SPEC, null, 2), field)).toBe(inJson));
});

test.each([
  ["name = ", 1, "TOML"],
  ['a = 1\nb = "open\n', 2, "TOML"],
  ["a = 1\na = 2\n", 2, "TOML"],
  ['{\n  "a": 1,\n}', 3, "JSON"],
  ['{"a": ', 1, "JSON"],
])("%j is not read, and its fault has a line", (text, line, language) => {
  const { spec, fault } = readSpecText(text);
  expect(spec).toBeNull();
  expect(fault?.problem).toContain(`not ${language} yet`);
  expect(lineOf(text, fault?.from ?? -1)).toBe(line);
});

test("a number that JSON has no word for is a fault at its place", () => {
  const text = "[optimizer]\nlearning_rate = inf\n";
  const { spec, fault } = readSpecText(text);
  expect(spec).toBeNull();
  expect(text.slice(fault?.from, fault?.to)).toBe("inf");
});

test("`__proto__` is a key as any other, which the gateway gets to see", () => {
  expect(JSON.stringify(readSpecText("__proto__ = 1\nmodel.__proto__.a = 2").spec)).toBe('{"__proto__":1,"model":{"__proto__":{"a":2}}}');
  expect(JSON.stringify(readSpecText('{"__proto__": 1}').spec)).toBe('{"__proto__":1}');
});

test("a text of nothing is a spec without keys", () => {
  expect(plain(readSpecText("").spec)).toEqual({});
});

test("the templates are the shipped specs, the demo's first, and each is read", () => {
  expect(TEMPLATES[0]?.id).toBe("demo");
  expect(TEMPLATES.length).toBeGreaterThan(10);
  expect(TEMPLATES.some(({ id }) => id.startsWith("chaos"))).toBe(false);
  for (const { id, title, text } of TEMPLATES) {
    expect(readSpecText(text).spec, id).not.toBeNull();
    expect(title, id).not.toBe("");
  }
});

/** Tables of a TOML text have no prototype, by which they would differ from a literal. */
function plain(spec: Table | null): unknown {
  return JSON.parse(JSON.stringify(spec));
}
