// @vitest-environment happy-dom
import { expect, it } from "vitest";
import { csvOf } from "./saving";

it("has a column for each curve, and names that no spreadsheet calculates", () => {
  const curves = [
    { label: '=HYPERLINK("x")', colour: "--c1", points: [[0, 0.5], [2, 1]] as [number, number][] },
    { label: "plain, with a comma", colour: "--c2", points: [[1, 5.2e-4]] as [number, number][] },
  ];
  expect(csvOf("iteration", curves)).toBe(`iteration,"'=HYPERLINK(""x"")","plain, with a comma"\n0,0.5,\n1,,0.00052\n2,1,\n`);
});
