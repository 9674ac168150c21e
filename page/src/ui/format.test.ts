import { expect, it } from "vitest";
import { duration, number, share, stackFlag, ticks } from "./format";

it("has three significant digits, however small or large a number is", () => {
  const shown = [5.2e-4, 1e-6, -5.2e-4, 0.00123, 0.05, 0.2, 0.8123, 1, 12.34, 123.4, 12345.6, 0, 1e30, NaN].map((value) => number(value));
  expect(shown).toEqual(["5.2e-4", "1e-6", "-5.2e-4", "0.00123", "0.05", "0.200", "0.812", "1", "12.3", "123", "12,346", "0", "1e30", "NaN"]);
});

it("says shares and times with three digits too", () => {
  expect([0.9312, 0.0002, 1, 0].map(share)).toEqual(["93.1 %", "0.02 %", "100 %", "0 %"]);
  expect([0, 0.00052, 0.0423, 0.4632, 1.04, 75.2].map(duration)).toEqual(["0 ms", "0.52 ms", "42.3 ms", "463 ms", "1.0 s", "1 min 15 s"]);
});

it("labels an axis with the decimals that its steps have", () => {
  expect(ticks([0, 0.25, 0.5, 0.75])).toEqual(["0.00", "0.25", "0.50", "0.75"]);
  expect(ticks([0, 0.2, 0.4])).toEqual(["0.0", "0.2", "0.4"]);
  expect(ticks([0, 2.5, 5])).toEqual(["0.0", "2.5", "5.0"]);
  expect(ticks([0, 0.00025, 0.0005])).toEqual(["0", "2.5e-4", "5.0e-4"]);
  expect(ticks([0.00001, 0.00002])).toEqual(["1e-5", "2e-5"]);
  expect(ticks([0, 5000, 10000])).toEqual(["0", "5k", "10k"]);
  expect(ticks([9, 10, 11])).toEqual(["9", "10", "11"]);
});

it("quotes the folder of a command that is copied into a shell", () => {
  expect(stackFlag("")).toBe("");
  expect(stackFlag("/srv/runs-2")).toBe(" --run-dir /srv/runs-2");
  expect(stackFlag("/a folder/it's")).toBe(` --run-dir '/a folder/it'\\''s'`);
});
