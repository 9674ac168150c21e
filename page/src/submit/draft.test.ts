// @vitest-environment happy-dom
import { expect, it } from "vitest";
import { FIRST_DRAFT, fitted } from "./draft";

it("begins with a model that the stack has", () => {
  const fit = fitted(FIRST_DRAFT, ["models/tiny", "models/large"]);
  expect(fit.text).toContain('path = "models/tiny"');
  expect(fit.text).not.toContain("two-digit-addition\"");
});

it("keeps its model where the stack has it, or says nothing of its models", () => {
  const named = /\[model\]\s*\npath = "([^"]+)"/.exec(FIRST_DRAFT.text)![1]!;
  expect(fitted(FIRST_DRAFT, ["models/tiny", named])).toBe(FIRST_DRAFT);
  expect(fitted(FIRST_DRAFT, [])).toBe(FIRST_DRAFT);
});
